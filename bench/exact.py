"""Counts the tokens and the bits that depend on how requests are run, with exact mode and without.

    python bench/exact.py bench/configs/llama8b --load-format dummy --out results --speculative-config \\
        '{"method": "eagle3", "model": "bench/configs/llama8b-eagle3", "num_speculative_tokens": 3}'

The same requests, half of them greedy and half seeded with top_p, run all at once as the reference, then in cells:
other batch sizes, other chunks of prompts, preempted, with prefix hits, with scripted drafts, n-gram drafts and drafts
of the model that --speculative-config names. Each cell is compared with the reference of its mode, token by token, and
by a hash of the bits of all logits that each token was drawn from, which the device makes.

With --load-format dummy weights are drawn from N(0, 0.02) and norms are one, so that texts and logits vary. A drafter's
own weights are as small as everywhere: its drafts are seldom right, and those of the script mostly are.

Results are kept under --out, one line of JSON for each cell. A call goes on where the last one ended, and begins no
cell that would not end within --seconds. Last line: JSON with the sums.
"""

from __future__ import annotations

import gc
import json
import random
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from outrider.benchmarks.prompt_sets import read_sets
from outrider.commands.loading import Loaded, load
from outrider.commands.parser import Parser, add_engine_flags, add_model, engine_config
from outrider.commands.run_prompts import Ask, run_prompts
from outrider.config import EngineConfig
from outrider.core import RequestOutput, SamplingParams
from outrider.core.outputs import Logprob
from outrider.engine.load import find_model, load_tokenizer
from outrider.llm import LLM
from outrider.models.base import Model
from outrider.models.loader import load_weights
from outrider.models.registry import build_model
from outrider.runner import step
from outrider.runner.device import pick_device, pick_dtype
from outrider.runner.worker import Worker
from outrider.sample.sampler import Sampled
from tests.drafters.scripted_drafter import ScriptedDrafter

NUM_DRAFTS, WRONG_EVERY = 3, 5  # of scripted drafts
NGRAM = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "auto": False}
SHARED = 64  # tokens with which every fourth prompt begins
ALL = 1_000_000  # requests
Answer = tuple[list[int], list[str]]  # tokens of a request, and for each the hash of the logits that it was drawn from


@dataclass(frozen=True)
class Setup:
    """How an engine is set up. Zero: prompts in chunks of the engine's own size."""

    drafts: str = ""  # scripted, ngram or head
    chunk: int = 0
    is_preempted: bool = False
    has_hits: bool = False  # the requests run twice

    @property
    def name(self) -> str:
        parts = [f"{self.drafts} drafts" if self.drafts else "", "prefix hits" if self.has_hits else "",
                 "preempted" if self.is_preempted else "", f"chunks of {self.chunk}" if self.chunk else ""]
        return ", ".join(filter(None, parts)) or "plain"


@dataclass(frozen=True)
class Cell:
    """A way to run the requests: the first so many of them, in groups."""

    setup: Setup
    at_once: int = ALL
    requests: int = ALL  # few at once take long, so those are fewer

    @property
    def name(self) -> str:
        return self.setup.name + (f", {self.at_once} at once" if self.at_once < ALL else "")

    def is_met(self, happened: dict[str, int]) -> bool:
        """Whether what the cell is about has happened."""
        setup = self.setup
        wanted = {"drafts": bool(setup.drafts), "hits": setup.has_hits, "preemptions": setup.is_preempted}
        return all(happened[name] > 0 for name, is_wanted in wanted.items() if is_wanted)


REFERENCE = Cell(Setup())
FEW = [(33, ALL), (8, 16), (2, 4), (1, 2)]  # at once, of so many requests


def cells(has_head: bool) -> list[Cell]:
    """In the order in which they run. Cells of one setup share an engine; the cell of a drafter with room for all says
    how many pages those with preemptions may have."""
    plain, scripted, *others = ([Cell(Setup(kind), *few) for few in [(ALL, ALL), *FEW]]
                                for kind in ("", "scripted", *(["head"] if has_head else []), "ngram"))
    kinds = [each[0].setup.drafts for each in (scripted, *others)]
    preempted = [Cell(Setup(kind, 320, is_preempted=True, has_hits=True)) for kind in kinds]
    hits = [Cell(Setup(kind, 320, has_hits=True)) for kind in kinds]
    return [*plain[1:], *scripted, preempted[0], Cell(Setup(chunk=96, has_hits=True)),
            *(cell for each in others for cell in each), *preempted[1:], Cell(Setup(chunk=160, is_preempted=True)),
            *hits]


@dataclass
class Result:
    """The counts of one cell. Differences are counted by place, from the first different token of a request on."""

    model: str
    exact: bool
    cell: str
    tokens: int
    differing_tokens: int
    differing_bits: int
    differing_requests: int
    happened: dict[str, int]
    is_met: bool
    pages: int  # that the requests need at their ends
    longest_pages: int  # that the longest request needs
    seconds: float


class Bench:
    """The requests of one model, its results so far, and the runs that are left."""

    def __init__(self, loaded: Loaded, config: EngineConfig, asks: list[Ask], out: Path) -> None:
        self._loaded, self._config, self._out = loaded, config, out
        self._asks = [replace(ask, params=replace(ask.params, logprobs=0)) for ask in asks]
        self._engine: tuple[Setup, bool, LLM] | None = None
        self._file = out / f"{loaded.name}.jsonl"
        lines = self._file.read_text().splitlines() if self._file.is_file() else []
        self.results = [Result(**json.loads(line)) for line in lines]

    def has(self, cell: Cell, exact: bool) -> bool:
        return self._find(cell.name, exact) is not None

    def _find(self, name: str, exact: bool) -> Result | None:
        return next((one for one in self.results if (one.cell, one.exact) == (name, exact)), None)

    def run(self, cell: Cell, exact: bool) -> Result:
        begin = time.monotonic()
        rounds, happened, pages = self._answers(cell, exact)
        reference = self._reference(exact, rounds[0] if cell is REFERENCE else None)
        found = [compare(one, other) for answers in rounds
                 for one, other in zip(reference[: len(answers)], answers, strict=True)]
        num_tokens = 0 if cell is REFERENCE else sum(len(tokens) for answers in rounds for tokens, _ in answers)
        result = Result(self._loaded.name, exact, cell.name, num_tokens, sum(tokens for tokens, _ in found),
                        sum(bits for _, bits in found), sum(map(any, found)), happened, cell.is_met(happened), *pages,
                        round(time.monotonic() - begin, 1))
        self.results.append(result)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        return result

    def _reference(self, exact: bool, made: list[Answer] | None = None) -> list[Answer]:
        file = self._out / f"{self._loaded.name}-{'exact' if exact else 'default'}.json"
        if made is not None:
            file.write_text(json.dumps(made))
        return [(tokens, digests) for tokens, digests in json.loads(file.read_text())]

    def close(self) -> None:
        if self._engine is not None:
            self._engine[2].close()
        self._engine = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _settings(self, setup: Setup, exact: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "exact": exact, "enable_prefix_caching": setup.has_hits, "overlap": not setup.has_hits,
            "max_num_seqs": len(self._asks), "speculative_config": None,
        }
        if setup.chunk:
            settings["max_num_batched_tokens"] = setup.chunk
        if setup.drafts == "ngram":
            settings["speculative_config"] = NGRAM
        elif setup.drafts == "head":
            settings["speculative_config"] = {"auto": False} | (self._config.speculative_config or {})
        if setup.is_preempted:
            unhindered = self._find(Setup(setup.drafts).name, exact)
            assert unhindered is not None, "the same drafts with room for all come first"
            settings["num_pages"] = 1 + max(unhindered.longest_pages + 1, unhindered.pages // 3)
            settings["kv_cache_memory_bytes"] = None
        return settings

    def _llm(self, setup: Setup, exact: bool) -> LLM:
        """An engine of this setup: the last cell's, if it has the same."""
        if self._engine is None or self._engine[:2] != (setup, exact):
            self.close()
            config = replace(self._config, **self._settings(setup, exact))
            drafter = self._scripted(exact) if setup.drafts == "scripted" else None
            worker = Worker(config, self._loaded.model, eos_ids=(), drafter=drafter)
            self._engine = setup, exact, self._loaded.llm(config, worker)
        return self._engine[2]

    def _answers(self, cell: Cell, exact: bool) -> tuple[list[list[Answer]], dict[str, int], tuple[int, int]]:
        """(the answers of every round, what happened, pages of all requests and of the longest)"""
        llm, asks = self._llm(cell.setup, exact), self._asks[: cell.requests]
        before = happened_in(llm)
        groups = [asks[start : start + cell.at_once] for start in range(0, len(asks), cell.at_once)]
        rounds = [[answer for group in groups for answer in answers_of(run_prompts(llm, group).outputs)]
                  for _ in range(1 + cell.setup.has_hits)]
        cache = llm.engine.scheduler.cache
        ends = [cache.pages_to_start(len(ask.token_ids) + (ask.params.max_tokens or 0)) for ask in asks]
        return rounds, {name: count - before[name] for name, count in happened_in(llm).items()}, (sum(ends), max(ends))

    def _scripted(self, exact: bool) -> ScriptedDrafter:
        """Drafts the reference's tokens, some of them wrong."""
        answers = zip(self._asks, self._reference(exact), strict=True)
        right = {tuple(ask.token_ids): tokens for ask, (tokens, _) in answers}
        vocab = self._loaded.model.vocab_size

        def script(prompt: tuple[int, ...], index: int) -> list[int]:
            return [(token + 1) % vocab if i % WRONG_EVERY == WRONG_EVERY - 1 else token
                    for i, token in enumerate(right[prompt])]

        return ScriptedDrafter(NUM_DRAFTS, script)


def happened_in(llm: LLM) -> dict[str, int]:
    stats = llm.engine.stats
    return {"drafts": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens, "hits": stats.num_hit_tokens,
            "preemptions": llm.engine.scheduler.stats.num_preemptions}


def answers_of(outputs: Sequence[RequestOutput]) -> list[Answer]:
    samples = [output.outputs[0] for output in outputs]
    return [(list(sample.token_ids), [digest(place[token]) for token, place in
                                      zip(sample.token_ids, sample.logprobs or [], strict=True)])
            for sample in samples]


def digest(chosen: Logprob) -> str:
    """The bits of the chosen token's log-probability, and the hash that `hashing` has put in place of its rank."""
    return struct.pack(">dq", chosen.logprob, chosen.rank).hex()


def hashing(sample: Callable[..., Sampled]) -> Callable[..., Sampled]:
    """The sampler, with a hash of each logit row's bits in place of the chosen token's rank."""

    def with_hashes(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Sampled:
        sampled = sample(logits, *args, **kwargs)
        if sampled.logprobs is None:
            return sampled
        ids = torch.cat([hash_rows(logits)[:, None], sampled.logprobs.ids[:, 1:]], dim=1)
        return sampled._replace(logprobs=replace(sampled.logprobs, ids=ids))

    return with_hashes


def hash_rows(logits: torch.Tensor) -> torch.Tensor:
    """[L] int64: a sum of integers, whose order does not matter, over the mixed bits of each logit and its place."""
    bits = logits.view(torch.int32).view(len(logits), -1)
    mixed = bits * (torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device) * 0x1E3779B1 | 1)
    mixed ^= (mixed >> 15) & 0x1FFFF
    mixed *= 0x2C1B3C6D
    mixed ^= (mixed >> 13) & 0x7FFFF
    return mixed.sum(dim=1, dtype=torch.int64)


def compare(one: Answer, other: Answer) -> tuple[int, int]:
    """(places with another token, places with other log-probabilities)"""
    counts = [sum(a != b for a, b in zip(first, second, strict=False)) + abs(len(first) - len(second))
              for first, second in zip(one, other, strict=True)]
    return counts[0], counts[1]


def random_tensors(model: Model, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, slot in model.weights().items():
        is_factor = len(slot.shape) == 1 and name.endswith((".weight", ".layer_scalar"))  # of norms, and of a layer
        made = torch.empty(slot.shape, dtype=slot.target.dtype, device=model.device)
        yield name, made.fill_(1.0) if is_factor else made.normal_(0.0, 0.02, generator=generator)


def load_random(config: EngineConfig) -> Loaded:
    source, device = find_model(config), pick_device(config.device)
    model = build_model(source.config, dtype=pick_dtype(config.dtype, source, device), device=device,
                        max_len=config.max_model_len, source=source.name)
    load_weights(model, random_tensors(model, config.seed))
    return Loaded(source.name, model, load_tokenizer(config, source), source.eos_token_ids)


def make_asks(loaded: Loaded, count: int, longest: int, max_tokens: int, seed: int) -> list[Ask]:
    """Prompts of 3 to `longest` tokens, pieces of texts where the model has a tokenizer and random ids otherwise."""
    chance, vocab = random.Random(seed), loaded.model.vocab_size
    if loaded.tokenizer is None:
        source = [chance.randrange(3, vocab) for _ in range(50_000)]
    else:
        texts = [text for one in read_sets(None) for text in one.prompts]
        source = [token for text in texts for token in loaded.tokenizer.encode(text)]
    asks = []
    for index in range(count):
        length = chance.randint(3, longest)
        start = chance.randrange(max(1, len(source) - length))
        begin = source[:SHARED] if index % 4 == 0 else []
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": seed + index} if index % 2 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampled)
        asks.append(Ask([*begin, *source[start : start + length]][:longest], params))
    return asks


def make_parser() -> Parser:
    parser = Parser(description=__doc__)
    add_model(parser)
    add_engine_flags(parser, skip=("exact",))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell that would end later")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=396, help="the longest prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--modes", default="exact,default")
    parser.add_argument("--cells", default="", help="a regular expression: only cells whose names it finds")
    return parser


def describe(result: Result) -> str:
    happened = ", ".join(f"{name} {count}" for name, count in result.happened.items() if count)
    return (f"{'exact' if result.exact else 'default':<8} {result.cell:<45} {result.tokens:>7} tokens, other tokens "
            f"{result.differing_tokens:>6}, other bits {result.differing_bits:>6}; {result.seconds:.0f} s; {happened}"
            + ("" if result.is_met else " (NOT TRIED: its condition did not occur)"))


def summarise(model: str, results: Sequence[Result], num_left: int) -> dict[str, Any]:
    sums: dict[str, Any] = {"bench": "exactness", "model": model, "cells_left": num_left}
    for mode, exact in (("exact", True), ("default", False)):
        own = [one for one in results if one.exact == exact and one.cell != REFERENCE.name]
        sums[mode] = {"cells": len(own), "not_tried": sum(not one.is_met for one in own),
                      "tokens": sum(one.tokens for one in own),
                      "differing_tokens": sum(one.differing_tokens for one in own),
                      "differing_bits": sum(one.differing_bits for one in own)}
    return sums


def main(argv: Sequence[str]) -> int:
    begin = time.monotonic()
    args = make_parser().parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    config = engine_config(args, speculative_config=None, max_model_len=args.prompt_len + args.max_tokens + 1)
    loaded = load_random(config) if config.load_format == "dummy" else load(config, needs_text=False)
    bench = Bench(loaded, config, make_asks(loaded, args.requests, args.prompt_len, args.max_tokens, config.seed),
                  args.out)
    modes = [mode == "exact" for mode in args.modes.split(",")]
    chosen = [cell for cell in cells(config.speculative_config is not None) if re.search(args.cells, cell.name)]
    wanted = [(cell, exact) for exact in modes for cell in [REFERENCE, *chosen]]
    left = [(cell, exact) for cell, exact in wanted if not bench.has(cell, exact)]
    longest = 0.0
    with patch.object(step, "sample", hashing(step.sample)):
        while left and time.monotonic() - begin + longest < args.seconds:
            result = bench.run(*left.pop(0))
            longest = max(longest, result.seconds)
            print(describe(result), flush=True)
        bench.close()
    print(json.dumps(summarise(loaded.name, bench.results, len(left))))
    return int(any(one.exact and one.differing_bits + one.differing_tokens for one in bench.results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
