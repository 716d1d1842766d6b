"""`outrider bench spec`: compares plain decoding with speculation, by batch size and prompt set.

Both engines share one model and take turns; the median of the rounds counts. The output is a table, a plot, and JSON as
the last line. The prompts of a set run in batches one after the other. Categories of one file are also added up.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outrider.benchmarks.prompt_sets import PromptSet, read_sets
from outrider.commands.loading import load
from outrider.commands.output_files import check_plot
from outrider.commands.parser import engine_config
from outrider.commands.run_prompts import Ask, run_prompts
from outrider.config import AUTO_DRAFTER
from outrider.core import RequestOutput, SamplingParams
from outrider.engine.stats import EngineStats
from outrider.engine.text import Tokenizer
from outrider.llm import LLM

DEFAULT = {"method": "ngram", "num_speculative_tokens": 4}  # of a model that comes without a drafter
NO_DRAFTS = ("no draft was checked: the drafter had none, or none pays here by the costs measured at start-up; "
             'the ratio says nothing of drafts ("auto": false in --speculative-config drafts regardless)')


@dataclass(frozen=True)
class Cell:
    prompts: str
    batch: int
    plain_tok_s: float
    spec_tok_s: float
    ratio: float  # median of the rounds' ratios
    mean_run: float
    mean_drafts: float  # drafts chosen per request and step
    drafted: int
    accepted: int
    acceptance_per_position: list[float]
    equal_requests: int  # requests with the same tokens in both
    num_requests: int


@dataclass(frozen=True)
class Comparison:
    """The measurements of all rounds of one prompt set at one batch size."""

    prompts: str
    batch: int
    tokens: tuple[list[int], list[int]]  # of each round: plain, with drafts
    seconds: tuple[list[float], list[float]]
    stats: EngineStats  # of the engine with drafts
    num_equal: int
    num_requests: int

    @classmethod
    def total(cls, name: str, parts: Sequence[Comparison]) -> Comparison:
        """Sum the measurements of several prompt sets."""
        stats = parts[0].stats
        for part in parts[1:]:
            stats = stats.plus(part.stats)
        tokens = [[sum(counts) for counts in zip(*(part.tokens[i] for part in parts), strict=True)] for i in (0, 1)]
        seconds = [[sum(times) for times in zip(*(part.seconds[i] for part in parts), strict=True)] for i in (0, 1)]
        return cls(name, parts[0].batch, (tokens[0], tokens[1]), (seconds[0], seconds[1]), stats,
                   sum(part.num_equal for part in parts), sum(part.num_requests for part in parts))

    def cell(self) -> Cell:
        speeds = [[count / time for count, time in zip(self.tokens[i], self.seconds[i], strict=True)] for i in (0, 1)]
        ratios = [spec / plain for plain, spec in zip(*speeds, strict=True)]
        stats = self.stats
        return Cell(
            self.prompts, self.batch, round(statistics.median(speeds[0]), 2), round(statistics.median(speeds[1]), 2),
            round(statistics.median(ratios), 3), round(stats.mean_run_length, 3), round(stats.mean_chosen, 2),
            stats.num_draft_tokens, stats.num_accepted_tokens,
            [round(rate, 3) for rate in stats.acceptance_per_position], self.num_equal, self.num_requests,
        )


def run(args: argparse.Namespace) -> int:
    sizes: tuple[int, ...] = args.batch_sizes
    sets = read_sets(args.prompts)
    check_plot(args.plot)
    config = engine_config(args, enable_prefix_caching=False, max_num_seqs=max(sizes))
    if config.speculative_config is None:
        config = replace(config, speculative_config=AUTO_DRAFTER)
    if config.speculative is None:
        config = replace(config, speculative_config=DEFAULT)
    loaded = load(config)
    tokenizer = loaded.need_tokenizer()
    plain = loaded.llm(config.without_drafts())
    found: list[Comparison] = []
    print(HEAD, flush=True)
    with plain, loaded.llm(config) as drafting:
        for prompts in sets:
            for size in sizes:
                found.append(_measure((plain, drafting), prompts, tokenizer, size, args))
                print(_line(found[-1].cell()), flush=True)
    if sum(prompts.is_category for prompts in sets) > 1:
        totals = [Comparison.total("all", [own for own in found if own.batch == size]) for size in sizes]
        print("\n".join(_line(total.cell()) for total in totals), flush=True)
        found += totals
    cells = [own.cell() for own in found]
    if config.speculative is not None and config.speculative.is_synthetic:
        print("acceptance was synthetic: the text is not the model's")
    if is_without_drafts(cells):
        print(NO_DRAFTS)
    if args.plot:
        from outrider.benchmarks.plot import plot_spec

        written = plot_spec([asdict(cell) for cell in cells], Path(args.plot), loaded.name)
        print(f"wrote {' and '.join(map(str, written))}")
    print(json.dumps({"bench": "spec", "model": loaded.name, "device": str(loaded.device),
                      "dtype": str(loaded.model.dtype).removeprefix("torch."), "rounds": args.rounds,
                      "max_tokens": args.max_tokens, "temperature": args.temperature,
                      "speculative_config": config.drafter_settings,
                      "results": [asdict(cell) for cell in cells]}))
    return 0


def _measure(llms: tuple[LLM, LLM], prompts: PromptSet, tokenizer: Tokenizer, batch: int,
             args: argparse.Namespace) -> Comparison:
    # Answers may end early: text after the end of an answer would not be typical for the model.
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, detokenize=False)
    texts = prompts.encode(tokenizer, args.prompts_per_set or batch)
    asks = [Ask(ids, replace(params, seed=seed)) for seed, ids in enumerate(texts)]
    for llm in llms:
        run_prompts(llm, [replace(ask, params=replace(params, max_tokens=2)) for ask in asks[:batch]])  # warm-up
    before = llms[1].engine.stats.copy()
    tokens: tuple[list[int], list[int]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])
    last: list[list[RequestOutput]] = []
    for i in range(args.rounds):
        last = []
        salted = [replace(ask, cache_salt=f"{prompts.name} {batch} {i}") for ask in asks]  # drafters recall no answer
        # Who goes first alternates, so that a machine that warms up favours neither.
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            label = f"{prompts.name} x {batch}, round {i + 1}"
            ran = [run_prompts(llms[which], salted[start : start + batch], label=label)
                   for start in range(0, len(asks), batch)]
            tokens[which].append(sum(part.num_tokens for part in ran))
            seconds[which].append(sum(part.seconds for part in ran))
            last.append([output for part in ran for output in part.outputs])
    one, two = ([output.outputs[0].token_ids for output in outputs] for outputs in last)
    num_equal = sum(own == other for own, other in zip(one, two, strict=True))
    return Comparison(prompts.name, batch, tokens, seconds, llms[1].engine.stats.since(before), num_equal, len(asks))


HEAD = (f"{'prompts':<14} {'batch':>5} {'plain tok/s':>11} {'spec tok/s':>11} {'ratio':>6} {'tok/step':>8} "
        f"{'drafts':>6} {'equal':>7}  acceptance by position")


def is_without_drafts(cells: Sequence[Cell]) -> bool:
    """Whether no draft was checked at all, so that the ratios do not depend on drafts."""
    return not any(cell.drafted for cell in cells)


def _line(cell: Cell) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in cell.acceptance_per_position)
    equal = f"{cell.equal_requests}/{cell.num_requests}"
    return (f"{cell.prompts:<14} {cell.batch:>5} {cell.plain_tok_s:>11.1f} {cell.spec_tok_s:>11.1f} {cell.ratio:>6.2f} "
            f"{cell.mean_run:>8.2f} {cell.mean_drafts:>6.2f} {equal:>7}  {rates}")
