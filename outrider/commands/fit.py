"""`outrider fit`: the settings with which a model fits a device's memory, without loading its weights."""

from __future__ import annotations

import argparse
from dataclasses import replace

from outrider.commands.parser import UsageError, engine_config
from outrider.core.status_line import status_line
from outrider.engine.load import find_model


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    with status_line(f"planning {config.model}"):
        source = find_model(replace(config, load_format="dummy"))  # fetches no weights
        from outrider.fitting.choice import ESTIMATED, FitChoice
        from outrider.fitting.room import read_size, room_of, room_of_size
        from outrider.fitting.search import Search
        from outrider.runner.device import pick_device

        if args.gpu is None:
            room = room_of(pick_device(config.device))
        else:
            room = room_of_size(read_size(args.gpu), _capability(args.capability))
        choice = FitChoice.from_search(config, Search(config, source, room, args.requests))
    if args.json:
        print(choice.json())
        return 0
    print("\n".join(choice.lines()))
    print(f"  {ESTIMATED}")
    for line in choice.advice():
        print(f"for more: {line}")
    print(f"\n{choice.command()}\nor, chosen again when it starts: outrider serve {config.model} --fit")
    return 0


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise UsageError(f"--capability: {text!r} is not a compute capability, such as 8.9")
    return int(major), int(minor)
