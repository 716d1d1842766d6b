"""`outrider bench exact`: measures the cost of exact mode, by batch size, for decoding and for prompts. Last line:
JSON.

One model runs in exact mode and then in the ordinary mode. Exact mode is first, so that a model that cannot be exact is
refused at once. Prompts are random, without prefix hits; answers are greedy and of a fixed length. Decoding is timed
with short prompts, the computation of prompts with answers of one token. The fastest round counts."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict, dataclass, replace

from outrider.benchmarks.throughput import Shape, Workload, workloads
from outrider.commands.loading import Loaded, load
from outrider.commands.parser import engine_config
from outrider.commands.run_prompts import run_prompts
from outrider.config import EngineConfig

log = logging.getLogger("outrider")

SHORT_PROMPT = 16  # tokens, before answers that are timed


@dataclass(frozen=True)
class Cell:
    kind: str  # decoding or prompts
    batch: int
    default_tok_s: float
    exact_tok_s: float
    ratio: float


def run(args: argparse.Namespace) -> int:
    sizes: tuple[int, ...] = args.batch_sizes
    config = engine_config(args, speculative_config=None, enable_prefix_caching=False, max_num_seqs=max(sizes))
    loaded = load(config, needs_text=False)
    room = loaded.model.max_positions if config.max_model_len is None else config.max_model_len
    prompt_len = min(args.prompt_len, room - 2)
    decoding = [Shape("decoding", size, SHORT_PROMPT, args.max_tokens) for size in sizes]
    shapes = [*decoding, Shape("prompt", 1, prompt_len, 1)]
    work = workloads(shapes, config.seed, loaded.model.vocab_size)[1]
    exact, default = (_speeds(loaded, replace(config, exact=mode), work, args.rounds) for mode in (True, False))
    kinds = ["decoding"] * len(decoding) + ["prompts"]
    cells = [Cell(kind, shape.batch, round(one, 1), round(other, 1), round(other / one, 3))
             for kind, shape, one, other in zip(kinds, shapes, default, exact, strict=True)]
    print(f"{'':<10} {'batch':>5} {'default tok/s':>13} {'exact tok/s':>11} {'ratio':>6}")
    for cell in cells:
        print(f"{cell.kind:<10} {cell.batch:>5} {cell.default_tok_s:>13.1f} {cell.exact_tok_s:>11.1f} "
              f"{cell.ratio:>6.2f}")
    print(json.dumps({"bench": "exact", "model": loaded.name, "device": str(loaded.device),
                      "dtype": str(loaded.model.dtype).removeprefix("torch."), "rounds": args.rounds,
                      "max_tokens": args.max_tokens, "prompt_len": prompt_len,
                      "results": [asdict(cell) for cell in cells]}))
    return 0


def _speeds(loaded: Loaded, config: EngineConfig, work: list[Workload], rounds: int) -> list[float]:
    """Tokens per second of each workload. Answer tokens are counted, or prompt tokens if the answer has one token."""
    speeds = []
    with loaded.llm(config) as llm:
        for each in work:
            asks = each.asks()
            run_prompts(llm, [replace(ask, params=replace(ask.params, max_tokens=2)) for ask in asks])  # warm-up
            seconds = min(run_prompts(llm, asks).seconds for _ in range(rounds))
            shape = each.shape
            speeds.append(shape.batch * (shape.prompt_len if shape.output_len == 1 else shape.output_len) / seconds)
            mode = "exact" if config.exact else "default"
            log.info("%s, %s, batch %d: %.1f tok/s", mode, shape.name, shape.batch, speeds[-1])
    return speeds
