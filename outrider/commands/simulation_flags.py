"""The flags of `outrider simulate`."""

from __future__ import annotations

import argparse

from outrider.commands.flag_values import count_flag, counts_flag, number_flag, whole_flag
from outrider.commands.simulated_routing import ROUTERS
from outrider.core.fields import INT64
from outrider.simulation.places import PlaceCosts

DISK_UNIT, DISK_HEAD = 4096, 96  # bytes: of the room that a file takes, and of what is written before a page
SIMULATE_EXAMPLES = """examples:
  outrider bench costs smollm2 -o costs.json
  outrider simulate costs.json --rate 0.5,1,2
  outrider simulate costs.json --rate 200 --replicas 32,64,128 --router prefix --prefixes 100 --prefix-len 1000
  outrider simulate costs.json --concurrency 64 --input-len lognormal:512:0.8 --output-len lognormal:128:0.5
  outrider simulate costs.json --trace trace.jsonl --tier host:64GiB:50 --tier disk:1TiB:5
  outrider simulate costs.json --trace trace.jsonl --ranks 4 --link-gb-s 400 --link-us 8

Runs the engine's own scheduler, cache and choice of drafts in simulated time. The last line of the output is JSON.
"""


def place_flag(text: str) -> PlaceCosts:
    """Read a place for cached pages: its name, its size and its speed."""
    name, _, rest = text.partition(":")
    size, _, speed = rest.partition(":")
    if name not in ("host", "disk") or not size or not speed:
        raise argparse.ArgumentTypeError(f"{text!r} must be host or disk, a size and gigabytes per second, as "
                                         "host:64GiB:50")
    size_bytes = whole_flag(1, INT64)(size)
    bandwidth = number_flag(1e-6, 1e9)(speed) * 1e9
    return PlaceCosts(name, size_bytes, bandwidth, *((DISK_UNIT, DISK_HEAD) if name == "disk" else ()))


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("costs", metavar="COSTS", help="the file that `outrider bench costs` has written")
    add_load_flags(parser)
    parser.add_argument("--replicas", type=counts_flag, default="1", metavar="N,N",
                        help="engines behind one router; several numbers are simulated one after the other "
                             "(default: %(default)s)")
    parser.add_argument("--router", choices=tuple(ROUTERS), default="least-load",
                        help="how requests find a replica (default: %(default)s)")
    parser.add_argument("--tier", type=place_flag, action="append", default=[], metavar="PLACE:SIZE:GB/S",
                        help="where pages lie beyond the device, as host:64GiB:50 or disk:1TiB:5; may be repeated")
    parser.add_argument("--ranks", type=count_flag, default=1, metavar="N",
                        help="devices of each replica, by tensor parallelism; estimated (default: %(default)s)")
    parser.add_argument("--link-gb-s", type=number_flag(1e-6, 1e9), default=400.0, metavar="X",
                        help="gigabytes per second between ranks, in each direction (default: %(default)s)")
    parser.add_argument("--link-us", type=number_flag(0, 1e9), default=8.0, metavar="X",
                        help="microseconds of the smallest sum over ranks (default: %(default)s)")
    parser.add_argument("--front-ms", type=number_flag(0, 1e9), default=0.0, metavar="X",
                        help="milliseconds that a server's front adds to a request before the engine sees it "
                             "(default: %(default)s)")
    parser.add_argument("--acceptance", metavar="P,P",
                        help="chance that a draft is accepted if those before it were, by position (default: that of "
                             "the file)")
    parser.add_argument("--step-by-step", action="store_true",
                        help="simulate every step by itself: slower, with the same result")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--save-result", metavar="FILE", help="write the JSON of the last line to a file")
    parser.add_argument("--plot", metavar="NAME", help="write NAME.png and NAME.svg (needs matplotlib)")


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", metavar="R,R", help="requests per second of all replicas; several are simulated one "
                                                      "after the other")
    parser.add_argument("--burst", type=count_flag, default=1, metavar="N",
                        help="requests that arrive together (default: %(default)s)")
    parser.add_argument("--concurrency", type=counts_flag, metavar="N,N",
                        help="clients that each wait for their answer before they ask again, instead of a rate")
    parser.add_argument("--trace", metavar="FILE", help="requests, a JSON object a line, instead of drawn ones")
    parser.add_argument("--num-requests", type=count_flag, default=1000, metavar="N",
                        help="requests of each simulation (default: %(default)s)")
    for flag, value, text in (("--input-len", "512", "prompt"), ("--output-len", "128", "answer")):
        parser.add_argument(flag, default=value, metavar="N",
                            help=f"tokens of a {text}, or lognormal:MEDIAN:SIGMA (default: %(default)s)")
    parser.add_argument("--prefixes", type=count_flag, metavar="N",
                        help="different beginnings that prompts share (default: none)")
    parser.add_argument("--prefix-len", type=count_flag, default=512, metavar="N",
                        help="tokens of a shared beginning, before those of --input-len (default: %(default)s)")
    parser.add_argument("--zipf", type=number_flag(0, 100), default=1.0, metavar="X",
                        help="how unevenly beginnings are used: the i-th as often as i to the power of -X "
                             "(default: %(default)s)")
