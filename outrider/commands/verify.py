"""`outrider verify`: runs the same requests in many variants, which must all give the same tokens.

The reference runs every request alone, without optional features. With several ranks it uses all of them, and one of
the variants uses one rank. For every request that differs, the two differing tokens are scored after the tokens that
both runs share. This distinguishes a near-tie of rounding from a fault. With `--exact` every difference of a bit is a
fault."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch

from outrider.cache.with_media import CacheWithMedia
from outrider.commands.compare import Difference, describe, differences, explain
from outrider.commands.loading import Loaded, OnRanks, load_or_find
from outrider.commands.parser import engine_config
from outrider.commands.run_prompts import Ask, prompt_ids, run_prompts
from outrider.commands.verify_bits import Bits, asking_for_bits, bits_of, describe_bits, summary
from outrider.commands.verify_prompts import PROMPTS
from outrider.config import EngineConfig
from outrider.core import RequestOutput, SamplingParams, ScheduledBatch, StepResult
from outrider.core.status_line import say, status_line
from outrider.engine.engine import Engine
from outrider.llm import LLM
from outrider.runner.commands import Answer, Command, CountPaddedSteps
from outrider.runner.interface import NoDeviceMemory, Runner

ROWS = 4  # requests at once
CHUNK = 16
NO_MEMORY = "no memory"
TIER_BYTES = 1 << 30  # of host memory, with `--tier`


@dataclass(frozen=True)
class Variant:
    """A way to run the requests, and the events that must have occurred for the run to count as a test of it."""

    name: str
    drafts: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    alone: bool = False
    rounds: int = 1  # the last round counts; a second round finds pages of the first in the prefix cache
    rests: bool = False  # the device's cache is emptied before the last round
    engines: int = 1  # one after the other; the last one counts
    pool: str = "ample"  # tight: too small for all requests; tighter: for requests that share pages by prefix hits
    expects: tuple[str, ...] = ()  # events that must have happened

    def missing(self, happened: dict[str, int]) -> list[str]:
        return [name for name in self.expects if not happened[name]]


def _variants(drafts: bool) -> list[Variant]:
    chunks = (("max_num_batched_tokens", CHUNK),)
    prefix = (("enable_prefix_caching", True),)
    padding = (("pad_requests", (ROWS, 2 * ROWS)), ("pad_tokens", (3, 7, 24, 96, 1024)))
    also = ("drafts",) if drafts else ()
    everything = Variant("all of these", drafts, chunks + prefix + padding + (("overlap", True),), rounds=2,
                     pool="tighter", expects=("hits", "chunks", "padded steps", "preemptions", *also))
    return [
        Variant("batched", drafts, expects=("batch mates", *also)),
        Variant("overlap", drafts, (("overlap", True),), expects=("overlap", *also)),
        Variant("prefix cache", drafts, prefix, rounds=2, expects=("hits", *also)),
        Variant("chunked prompts", drafts, chunks, expects=("chunks", *also)),
        Variant("padded", drafts, padding, expects=("padded steps", *also)),
        Variant("small pool", drafts, pool="tight", expects=("preemptions", *also)),
        everything,
    ]


def tier_variants(drafts: bool, folder: str) -> list[Variant]:
    """Return variants in which prefixes come from the device, from host memory, and from files that another engine
    wrote."""
    prefix = (("enable_prefix_caching", True),)
    host, disk = (("host_cache_memory", TIER_BYTES),), (("disk_cache_dir", f"{folder}/{drafts}"),)
    return [
        Variant("device hits", drafts, prefix + host, rounds=2, expects=("hits",)),
        Variant("host hits", drafts, prefix + host, rounds=2, rests=True, expects=("host hits",)),
        Variant("disk hits after restart", drafts, prefix + disk, engines=2, expects=("disk hits",)),
        Variant("host and disk hits", drafts, prefix + host + disk, rounds=2, rests=True, engines=2,
                expects=("host hits", "disk hits")),
    ]


ONE_RANK = Variant("one rank", settings=(("tensor_parallel_size", 1), ("nnodes", 1)))


def all_variants(speculative: bool) -> list[Variant]:
    if not speculative:
        return _variants(False)
    plain = [variant for variant in _variants(False) if variant.name in ("batched", "all of these")]
    return [*plain, Variant("alone", True, alone=True, expects=("drafts",)), *_variants(True)]


@dataclass
class Row:
    """The result of one variant, as a row of the printed table."""

    way: str  # name of the variant; a key of the JSON that `--json` prints
    drafts: bool
    compared: int  # tokens
    equal: int  # requests
    requests: int
    happened: dict[str, int]
    is_met: bool  # whether every event that the variant is for happened
    verdict: str  # equal, near-tie, fault; no memory: it could not run
    detail: str = ""
    differing_bits: int = 0  # requests whose log-probabilities differ, with `--exact`
    missing: list[str] = field(default_factory=list)  # events that the variant is for and that did not happen


class Check:
    """Runs the requests as reference and in every variant, and compares the results."""

    def __init__(self, loaded: Loaded | OnRanks, config: EngineConfig, asks: Sequence[Ask]) -> None:
        self._loaded = loaded
        self._asks = asking_for_bits(asks, loaded.outline.vocab_size) if config.exact else list(asks)
        longest = max(len(ask.token_ids) + (ask.params.max_tokens or 0) for ask in asks)
        self._config = replace(config, max_model_len=min(longest + 1, loaded.outline.max_positions), max_num_seqs=ROWS,
                               enable_prefix_caching=False, overlap=False)
        # Pages of the longest request, and of several that start: without and with drafts.
        self._pages: dict[bool, tuple[int, int]] = {}
        self.reference: list[list[int]] = []
        self._bits: list[Bits] = []  # the reference's
        self._scores: dict[tuple[int, ...], dict[int, float]] = {}  # prompt to log-probability of each next token

    @property
    def model_name(self) -> str:
        return self._loaded.name

    @property
    def num_requests(self) -> int:
        return len(self._asks)

    def run_reference(self) -> None:
        self.reference, self._bits, _ = self._answers(Variant("reference", alone=True))

    def run_one_rank(self) -> Row:
        """Run the variant with one rank. If the device has too little memory for it, the row says so."""
        try:
            return self.run(ONE_RANK)
        except NoDeviceMemory as error:
            return Row(ONE_RANK.name, False, 0, 0, len(self._asks), {}, False, NO_MEMORY, str(error))

    def run(self, variant: Variant) -> Row:
        tokens, bits, happened = self._answers(variant)
        found = [self._explain(index, position, tokens[index]) for index, position in self._differences(tokens)]
        faults = [difference for difference in found if not difference.is_near_tie]
        missing = variant.missing(happened)
        row = Row(variant.name, variant.drafts, sum(map(len, tokens)), len(tokens) - len(found), len(tokens), happened,
                  not missing, "fault" if faults else "near-tie" if found else "equal", missing=missing)
        if found:
            worst = faults[0] if faults else max(found, key=lambda difference: difference.apart)
            row.detail = describe(worst, self._loaded.tokenizer)
        if self._config.exact:
            row.differing_bits, detail = describe_bits(self._bits, bits)
            row.verdict = "fault" if row.differing_bits or found else "equal"
            row.detail = row.detail or detail
        return row

    def _differences(self, tokens: list[list[int]]) -> list[tuple[int, int]]:
        found = differences(self.reference, tokens)
        self._score([self._before(index, position) for index, position in found])
        return found

    def _before(self, index: int, position: int) -> tuple[int, ...]:
        """Return the prompt and the output tokens before the difference, which both runs share."""
        return (*self._asks[index].token_ids, *self.reference[index][:position])

    def _explain(self, index: int, position: int, tokens: list[int]) -> Difference:
        first, second = (next(iter(run[position:]), None) for run in (self.reference[index], tokens))
        dtype = str(self._loaded.outline.dtype).removeprefix("torch.")
        return explain(index, position, self._asks[index], (first, second),
                       self._scores[self._before(index, position)], dtype)

    def _score(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Compute the log-probabilities of every token after each prompt. Prompts run one by one, like the
        reference."""
        fresh = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._scores]
        if not fresh:
            return
        config = replace(self._config_of(Variant("reference", alone=True)), logprobs_mode="raw",
                         max_logprobs=self._loaded.outline.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        with self._loaded.llm(config) as llm:
            for prompt in fresh:
                (entry,) = run_prompts(llm, [Ask(list(prompt), params)]).outputs[0].outputs[0].logprobs or [{}]
                self._scores[prompt] = {token: named.logprob for token, named in entry.items()}

    def _config_of(self, variant: Variant) -> EngineConfig:
        settings = dict(variant.settings)
        if not variant.drafts:
            settings |= {"speculative_config": None, "adapt_drafter": False}
        elif (drafting := self._config.drafter_settings) is not None:
            # The most drafts there may be, whatever they cost, so that more is checked.
            settings["speculative_config"] = {"auto": False} | drafting
        if variant.pool != "ample":
            settings["num_pages"] = self._small_pool(variant)
        return replace(self._config, **settings)

    def _small_pool(self, variant: Variant) -> int:
        """Return the number of pages of a small pool: enough for the longest request. Unless the variant is "tighter",
        it is also enough for several requests to start, but not for all of them to end."""
        if variant.drafts not in self._pages:
            with self._loaded.llm(self._config_of(Variant("probe", variant.drafts))) as llm:
                cache, max_len = llm.engine.scheduler.cache, llm.engine.limits.max_len
            lengths = sorted((len(ask.token_ids) for ask in self._asks), reverse=True)[: ROWS - 1]
            starts = sum(cache.pages_to_start(length + 1) for length in lengths)
            self._pages[variant.drafts] = (cache.pages_to_start(max_len), starts + 1)
        one, several = self._pages[variant.drafts]
        return 1 + (one if variant.pool == "tighter" else max(one, several))

    def _answers(self, variant: Variant) -> tuple[list[list[int]], list[Bits], dict[str, int]]:
        """Run the requests. Returns (tokens of each request, their log-probabilities with `--exact`, counts of events
        that occurred)."""
        config = self._config_of(variant)
        for _ in range(variant.engines - 1):
            with self._loaded.llm(config) as llm:
                self._run(llm, variant)
        with self._loaded.llm(config) as llm:
            watch = llm.engine.worker.runner = _Watch(llm.engine.runner)
            outputs = self._run(llm, variant)
            happened = watch.happened(llm.engine)
        return [output.outputs[0].token_ids for output in outputs], bits_of(outputs), happened

    def _run(self, llm: LLM, variant: Variant) -> list[RequestOutput]:
        asks = self._asks
        if variant.pool != "ample":  # both requests of a prompt would fit into the pool if they shared its pages
            asks = [replace(ask, cache_salt=str(i % 2)) for i, ask in enumerate(asks)]
        batches = [[ask] for ask in asks] if variant.alone else [asks]
        outputs: list[RequestOutput] = []
        for number in range(variant.rounds):
            if variant.rests and number == variant.rounds - 1:
                llm.engine.rest()
            outputs = [output for batch in batches for output in run_prompts(llm, batch).outputs]
        return outputs


class _Watch:
    """Wraps a worker's runner, and counts events of the engine."""

    def __init__(self, worker: Runner) -> None:
        self._inner = worker
        self._chunks = self._mates = 0

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        self._chunks += sum(not samples for samples in batch.samples)
        self._mates += batch.num_requests > 1
        return self._inner.submit(batch)

    def command(self, command: Command[Answer]) -> Future[Answer]:
        return self._inner.command(command)

    def idle(self, quiet_seconds: float) -> float | None:
        return self._inner.idle(quiet_seconds)

    def close(self) -> None:
        self._inner.close()

    def happened(self, engine: Engine) -> dict[str, int]:
        stats, scheduler = engine.stats, engine.scheduler.stats
        return {
            "batch mates": self._mates, "hits": stats.num_hit_tokens, "chunks": self._chunks,
            "padded steps": self.command(CountPaddedSteps()).result(), "preemptions": scheduler.num_preemptions,
            "overlap": int(scheduler.max_steps_in_flight > 1), "drafts": stats.num_draft_tokens,
            "accepted": stats.num_accepted_tokens, **tier_hits(engine),
        }


def tier_hits(engine: Engine) -> dict[str, int]:
    """Return the number of pages that came from other storage than the device, by storage."""
    cache = engine.scheduler.cache
    loaded = cache.media.stats.num_loaded if isinstance(cache, CacheWithMedia) else {}
    return {f"{name} hits": loaded.get(name, 0) for name in ("host", "disk")}


def make_asks(loaded: Loaded | OnRanks, quick: bool, max_tokens: int, seed: int) -> list[Ask]:
    """Make two requests of every prompt, one greedy and one sampled, in turn, so that both kinds are in one batch."""
    if loaded.tokenizer is None:
        source = torch.Generator().manual_seed(seed)
        vocab = loaded.outline.vocab_size
        prompts = [torch.randint(0, vocab, (20 + 9 * i,), generator=source).tolist() for i in range(6)]
    else:
        prompts = [prompt_ids(loaded.tokenizer, text) for text in PROMPTS]
    if quick:
        prompts = prompts[:3]
    modes = (SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False),
             SamplingParams(temperature=1, max_tokens=max_tokens, detokenize=False))
    return [Ask(prompt, params if params.is_greedy else replace(params, seed=seed + i))
            for i, prompt in enumerate(prompts) for params in modes]


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    if config.speculative is not None and config.speculative.is_synthetic:
        raise ValueError("synthetic acceptance changes the text on purpose: there is nothing to verify. Leave the "
                         "synthetic settings out of --speculative-config")
    loaded = load_or_find(config, needs_text=False)
    logging.getLogger("outrider").setLevel(logging.ERROR)  # engines come and go; each would repeat its warnings
    asks = make_asks(loaded, args.quick, args.max_tokens, config.seed)
    check = Check(loaded, config, asks)
    with TemporaryDirectory(prefix="outrider-verify-") as folder:
        return _run_all(args, config, check, folder)


def _variants_asked(args: argparse.Namespace, config: EngineConfig, folder: str) -> list[Variant]:
    speculative = config.speculative is not None
    if not args.tier:
        return all_variants(speculative)
    return [variant for drafts in (False, True)[: 1 + speculative] for variant in tier_variants(drafts, folder)]


def _run_all(args: argparse.Namespace, config: EngineConfig, check: Check, folder: str) -> int:
    variants = _variants_asked(args, config, folder)
    rows: list[Row] = []
    if not args.json:
        print(f"{'run':<30} {'requests equal':>14} {'tokens':>7}  {'verdict':<9} what happened in it", flush=True)
    with status_line(f"the reference, {check.num_requests} requests one by one, then {len(variants)} runs"):
        check.run_reference()
    if config.tensor_parallel_size > 1 and not config.exact:  # bits are those of one number of ranks
        variants.insert(0, ONE_RANK)
    for number, variant in enumerate(variants, 1):
        with status_line(f"run {number} of {len(variants)}: {_name(variant.name, variant.drafts)}"):
            rows.append(check.run_one_rank() if variant is ONE_RANK else check.run(variant))
        if not args.json:
            _print_row(rows[-1])
    faults = [row for row in rows if row.verdict == "fault"]
    if args.json:
        print(json.dumps({"model": check.model_name, "passed": not faults, "rows": [asdict(row) for row in rows]}))
    else:
        _print_summary(rows, faults, config.exact)
    return int(bool(faults))


def _name(way: str, drafts: bool) -> str:
    return way + (" + drafts" if drafts else "")


def _print_row(row: Row) -> None:
    happened = ", ".join(f"{name} {count}" for name, count in row.happened.items() if count)
    note = happened
    if not row.is_met:
        why = "its device has too little memory" if row.verdict == NO_MEMORY else f"no {', no '.join(row.missing)}"
        note = f"{happened}  (NOT TRIED: {why})"
    equal = f"{row.equal} of {row.requests}"
    print(f"{_name(row.way, row.drafts):<30} {equal:>14} {row.compared:>7}  {row.verdict:<9} {note}", flush=True)


def _print_summary(rows: list[Row], faults: list[Row], is_exact: bool) -> None:
    for row in rows:
        if row.detail and row.verdict != NO_MEMORY:
            kind = "a fault" if row.verdict == "fault" else "the widest difference"
            print(f"\n{_name(row.way, row.drafts)}, {kind}: {row.detail}")
    ties = sum(row.verdict == "near-tie" for row in rows)
    lacking = [row for row in rows if row.missing]
    missing = ", ".join(dict.fromkeys(name for row in lacking for name in row.missing))
    tail = f", {ties} of them but for near-ties of arithmetic" if ties else ""
    num_run = sum(row.verdict != NO_MEMORY for row in rows)
    print(f"\n{num_run - len(faults)} of {len(rows)} runs give the reference's tokens{tail}"
          + (f"; {len(lacking)} of them without {missing}, which they are meant to try" if lacking else "")
          + (f"; {len(rows) - num_run} not tried" if num_run < len(rows) else "")
          + (f"; {len(faults)} FAULTS" if faults else ""))
    if is_exact:
        occurred = [name for name in rows[0].happened if any(row.happened[name] for row in rows)]
        print(summary(sum(row.compared for row in rows), len(rows), sum(row.differing_bits for row in rows), occurred))
    if faults:
        say("outrider: error: tokens depend on how they were computed; please report the text above with the output of "
            "`outrider env`")
