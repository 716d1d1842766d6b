"""Stands for `vllm.benchmarks.datasets`: prompts for a script's own benchmark.

There are two sets: random words, and the lines of a given file. Others are refused with what to do instead.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__path__: list[str] = []  # a package in vLLM: see compat/not_here.py
__all__ = ["SampleRequest", "add_dataset_parser", "get_samples"]


@dataclass
class SampleRequest:
    prompt: str
    prompt_len: int  # tokens
    expected_output_len: int = 0
    multi_modal_data: None = None
    lora_request: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--dataset-name", default="random", help="random, or custom: the lines of --dataset-path")
    parser.add_argument("--dataset-path", default=None, help='JSON objects, one a line, such as {"prompt": "Hello"}')
    for name in ("random", "custom"):
        parser.add_argument(f"--{name}-output-len", type=int, default=128)
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--enable-multimodal-chat", action="store_true", help=argparse.SUPPRESS)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """Make the prompts of a benchmark. `tokenizer`: transformers' tokenizer, or `llm.get_tokenizer()`."""
    match args.dataset_name:
        case "random":
            draw = random.Random(args.seed)
            ids = [[draw.randrange(len(tokenizer)) for _ in range(args.random_input_len)]
                   for _ in range(args.num_prompts)]
            texts, length = [tokenizer.decode(own, skip_special_tokens=True) for own in ids], args.random_output_len
        case "custom" if args.dataset_path is not None:
            lines = Path(args.dataset_path).read_text(encoding="utf-8").splitlines()
            texts = [json.loads(line)["prompt"] for line in lines if line.strip()][: args.num_prompts]
            length = args.custom_output_len
        case _:
            raise ValueError(f"dataset_name={args.dataset_name!r} is not supported: use random, or custom with "
                             'dataset_path, a file with a JSON object a line, such as {"prompt": "Hello"}')
    return [SampleRequest(text, len(tokenizer.encode(text, add_special_tokens=False)), length) for text in texts]
