"""`outrider bench costs`: measures how long steps of an engine take on this machine, for `outrider simulate`.

The engine runs as it does in a server: its worker is a separate process, and steps with prompts are bounded. Steps are
timed in the engine, so that a step's time includes everything between two results.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist, median

from outrider.benchmarks.model_facts import MeasureFacts
from outrider.benchmarks.step_times import Pace, TimedEngine
from outrider.cache.groups import CacheLayout
from outrider.commands.output_files import check_result_file
from outrider.commands.parser import engine_config
from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.costs import ReadCost
from outrider.engine.engine import Engine
from outrider.engine.start import start_engine
from outrider.runner.commands import PrepareIdle
from outrider.runner.graphs.sizes import GraphSizes
from outrider.runner.interface import BoundedSteps
from outrider.simulation.cost_table import MOST_REQUESTS, CostTable, DecodeSteps, HostCosts, PromptSteps

CUDA_REQUESTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CPU_REQUESTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CUDA_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_CHOSEN = 2048  # tokens of the largest captured size that is measured beside CUDA_TOKENS
CPU_TOKENS = (8, 16, 32, 64, 128, 256, 512)
SHORT_CONTEXT = 32  # tokens behind which steps decode on a CPU, and before longer contexts are measured
LONG_CONTEXTS = {"cuda": (32, 4096), "cpu": (4, 768)}  # requests and tokens behind which they decode, for reading
MIDDLE_CONTEXT = 512  # mean of the tokens behind which requests decode on a GPU; those behind them cost less each
SPREAD = 0.5  # of the contexts' lengths around their mean: sigma of a lognormal distribution
FEW_REQUESTS = 16  # requests of the smallest steps with prompts that are measured; those with fewer take hardly less
MOST_AMONG_MANY = 1024  # tokens of the largest steps with prompts that are measured among many requests
SHORT_PROMPT = 128  # prompts of steps with prompts: their attention takes little time
REPEATS = 3
IDLE_SECONDS = 60.0  # without requests, so that a worker captures whatever steps lacked
NO_HOST = HostCosts(0.0, 0.0)


class CostBench:
    """Measures the step times of one worker, and makes a cost table of them."""

    def __init__(self, engine: Engine, config: EngineConfig, say: Callable[[str], None]) -> None:
        self._worker, self._config, self._say = engine.runner, config, say
        self._info = engine.runner.info  # type: ignore[attr-defined]
        self._is_cuda = not self._info.device_name.upper().startswith("CPU")
        self._num_steps = 24 if self._is_cuda else 8

    @property
    def _limits(self) -> Limits:
        return self._info.limits

    def measure(self, name: str) -> CostTable:
        facts = self._worker.command(MeasureFacts(name)).result()
        decoding, prompts = [], []
        host = NO_HOST
        reading: tuple[ReadCost, ...] = ()
        attending: tuple[ReadCost, ...] = ()
        counts = range(self._limits.max_drafts + 1)
        for drafts in counts:
            timed = TimedEngine(self._config, self._worker, drafts)  # type: ignore[arg-type]
            try:
                if drafts == 0:
                    reading, attending = self._reading(timed), self._attending(timed)
                paces = self._decoding(timed, drafts)
                if drafts in (0, counts[-1]):
                    prompts += self._prompts(timed, drafts, reading, attending)
                if drafts == 0:
                    host = self._host(timed, paces, prompts[0])
                seconds = (max(0.0, self._device(pace, host) - self._reading_seconds(reading, count))
                           for count, pace in paces.items())
                decoding.append(DecodeSteps(drafts, tuple(paces), tuple(seconds)))
            finally:
                timed.close()
        speculative = self._config.speculative
        rates = () if speculative is None else speculative.synthetic_rates or ()
        return CostTable(facts, self._info, host, tuple(decoding), tuple(prompts), reading, attending, rates,
                         submits_early=self._config.overlap is not False,
                         enable_prefix_caching=self._config.enable_prefix_caching)

    def _decoding(self, timed: TimedEngine, drafts: int) -> dict[int, Pace]:
        """Measure decode steps with `drafts` drafts. Returns their pace by the number of requests, ascending."""
        most = self._limits.max_requests
        counts = sorted({*(n for n in (CUDA_REQUESTS if self._is_cuda else CPU_REQUESTS) if n < most), most})
        all_contexts = {count: self._contexts(count) for count in counts}
        prompts = [timed.prompt(max(own[index] for own in all_contexts.values() if index < len(own)))
                   for index in range(most)]
        paces: dict[int, Pace] = {}
        for count, contexts in reversed(all_contexts.items()):  # later prompts are found in the cache
            paces[count] = timed.decode_pace([prompt[:own] for prompt, own in zip(prompts, contexts, strict=False)],
                                             self._num_steps)
            self._say(f"{count} requests decode with {drafts} drafts behind {sum(contexts) // count} tokens: "
                      f"{paces[count].interval * 1e3:.2f} ms, "
                      f"of these {paces[count].host * 1e3:.2f} ms of the host")
        return dict(sorted(paces.items()))

    def _contexts(self, num_requests: int) -> list[int]:
        """Return the context length of each request in a measured decode step, in tokens, the longest first.

        On a CPU all contexts are short. On a GPU the lengths have a log-normal distribution, as on a server: a step
        takes as long as its longest context, and short contexts would hide how costs differ with the number of
        requests."""
        if not self._is_cuda:
            return [SHORT_CONTEXT] * num_requests
        room = (self._info.num_pages - 1) // 2 * 16 // num_requests
        mean = min(MIDDLE_CONTEXT, self._limits.max_len // 4, room)
        shares = [math.exp(SPREAD * NormalDist().inv_cdf(1 - (index + 0.5) / num_requests) - SPREAD**2 / 2)
                  for index in range(num_requests)]
        return [max(1, min(round(mean * share), self._limits.max_len // 2)) for share in shares]

    def _reading_seconds(self, reading: tuple[ReadCost, ...], num_requests: int) -> float:
        """The part of a measured decode step of `num_requests` requests that is spent on reading their contexts, in
        seconds."""
        return sum(cost.seconds * min(context, cost.window or context)
                   for context in self._contexts(num_requests) for cost in reading)

    def _device(self, pace: Pace, host: HostCosts = NO_HOST) -> float:
        """Return the device's part of a step, in seconds. With one step in flight, the host's seconds follow those of
        the device. With two, the device waits for the host only if two steps are done sooner than the host has answered
        the first."""
        if self._limits.steps_in_flight == 1:
            return max(0.0, pace.interval - pace.host)
        answer = host.latency + pace.host
        return pace.interval if pace.interval >= answer else max(0.0, 2 * pace.interval - answer)

    def _host(self, timed: TimedEngine, paces: dict[int, Pace], prompts: PromptSteps) -> HostCosts:
        """Measure the seconds that the host needs. Those for a step and for each request of a step are found from the
        smallest and the largest step. The other two are the seconds from a request's arrival to its first step, and how
        much longer a step takes if no other step is in flight."""
        few, many = min(paces), max(paces)
        each = max(0.0, (paces[many].host - paces[few].host) / max(1, many - few))
        start = median(timed.start_seconds() for _ in range(REPEATS))
        latency, length = 0.0, prompts.tokens[0]
        if self._limits.steps_in_flight > 1:
            latency = max(0.0, median(timed.lone_seconds(length) for _ in range(REPEATS)) - prompts.seconds[0])
        return HostCosts(max(0.0, paces[few].host - few * each), each, start, latency)

    def _reading(self, timed: TimedEngine) -> tuple[ReadCost, ...]:
        """Measure the cost of reading a token of context, which is divided among the layers by the bytes that they keep
        of a token."""
        count, context = LONG_CONTEXTS["cuda" if self._is_cuda else "cpu"]
        count = min(count, self._limits.max_requests)
        context = min(context, self._limits.max_len - 128, (self._info.num_pages - 1) // 2 * 16 // count)
        by_window = _bytes_by_window(self._info.layout)

        def device_seconds(length: int) -> float:
            return self._device(timed.decode_pace([timed.prompt(length) for _ in range(count)], self._num_steps))

        short_seconds = device_seconds(SHORT_CONTEXT)

        def measured(length: int) -> tuple[float, float]:
            """Return the (seconds, bytes) that a context of this length adds to a step, per request."""
            more = max(0.0, device_seconds(length) - short_seconds)
            self._say(f"{count} requests behind {length} tokens: {more * 1e3:.2f} ms more than behind few")
            return more / count, sum(size * (min(length, window or length) - min(SHORT_CONTEXT, window or length))
                                     for window, size in by_window.items())

        seconds, moved = measured(context)
        if self._is_cuda and context >= 2 * MIDDLE_CONTEXT:
            first_seconds, first_moved = measured(MIDDLE_CONTEXT)
            return reading_costs(by_window, first_seconds / first_moved, (seconds - first_seconds)
                                 / (moved - first_moved) if moved > first_moved else 0.0)
        return tuple(ReadCost(window, size * (seconds / moved)) for window, size in by_window.items())

    def _attending(self, timed: TimedEngine) -> tuple[ReadCost, ...]:
        """Measure attention's seconds for each pair of a prompt token and a key. They follow from the difference
        between one long prompt and short prompts with the same number of tokens in all."""
        most = CUDA_TOKENS[-1] if self._is_cuda else CPU_TOKENS[-1]
        tokens = min(most, self._limits.max_batched_tokens, self._limits.max_len - 1)
        short = self._short(tokens)
        long_seconds, short_seconds = (self._prompt_seconds(timed, length, tokens) for length in (tokens, short))
        sizes = _bytes_by_window(self._info.layout)
        shares = {window: size / sum(sizes.values()) for window, size in sizes.items()}
        pairs = tokens / 2 * sum(share * (min(tokens, window or tokens) - min(short, window or short))
                                 for window, share in shares.items())
        each = max(0.0, (long_seconds - short_seconds) / pairs) if pairs else 0.0
        self._say(f"a prompt of {tokens} tokens: {long_seconds * 1e3:.1f} ms; short ones: {short_seconds * 1e3:.1f} ms")
        return tuple(ReadCost(window, share * each) for window, share in shares.items())

    def _prompts(self, timed: TimedEngine, drafts: int, reading: tuple[ReadCost, ...],
                 attending: tuple[ReadCost, ...]) -> list[PromptSteps]:
        """Measure steps with prompts, by the number of tokens: one table for each number of requests to which these
        steps are padded."""
        found, before = [], 0
        for requests in self._padded_requests:
            num_decoding = 1 if not before else before + (requests - before) * 2 // 5
            sizes = [size for size in self._prompt_sizes() if size > num_decoding * (1 + timed.num_drafts)
                     and (not before or size <= MOST_AMONG_MANY)]
            seconds = []
            for size in sizes:
                length = self._short(size, requests - num_decoding)
                attention = size / 2 * sum(cost.seconds * min(length, cost.window or length) for cost in attending)
                attention += self._reading_seconds(reading, num_decoding)
                seconds.append(max(0.0, self._prompt_seconds(timed, length, size, num_decoding) - attention))
                self._say(f"{size} tokens with prompts, {num_decoding} requests decode, {drafts} drafts proposed: "
                          f"{seconds[-1] * 1e3:.2f} ms")
            if sizes:
                padded_up_to = min(max(self._captured_sizes, default=0), sizes[-1])
                found.append(PromptSteps(drafts, tuple(sizes), rising(seconds), padded_up_to, requests))
            before = requests
        found[-1] = replace(found[-1], requests=MOST_REQUESTS)
        return found

    @property
    def _padded_requests(self) -> list[int]:
        """The numbers of requests to which captured steps with prompts are padded, ascending. Without captures steps
        are not padded, so their time depends on their tokens alone."""
        most = self._limits.max_requests
        sizes = GraphSizes.from_limits(self._limits).prompt_requests if self._captured_sizes else []
        return [size for size in sizes if size >= FEW_REQUESTS] or [most]

    def _prompt_sizes(self) -> list[int]:
        """The numbers of tokens for which steps with prompts are measured, ascending."""
        sizes = {*(CUDA_TOKENS if self._is_cuda else CPU_TOKENS), *self._captured_sizes}
        return sorted(size for size in sizes if size <= self._most_prompt_tokens)

    @property
    def _most_prompt_tokens(self) -> int:
        return min(self._limits.max_batched_tokens, (self._limits.max_len - 1) * self._limits.max_requests)

    @property
    def _captured_sizes(self) -> tuple[int, ...]:
        """The padded sizes of steps with prompts among which the scheduler chooses. Each is measured, because the times
        of a GPU's products cannot be interpolated from a few sizes."""
        prompt_steps = self._info.prompt_steps
        if not (self._is_cuda and isinstance(prompt_steps, BoundedSteps)):
            return ()
        return tuple(size for size in prompt_steps.costs.tokens if size <= min(MOST_CHOSEN, self._most_prompt_tokens))

    def _prompt_seconds(self, timed: TimedEngine, length: int, tokens: int, num_decoding: int = 1) -> float:
        """Measure a step of `tokens` tokens: requests that decode, and new prompts of `length` tokens. The first run is
        not counted: after it the missing graph is captured."""
        if self._limits.max_requests == 1:
            return median([timed.lone_seconds(tokens) for _ in range(1 + REPEATS)][1:])
        whole, rest = divmod(max(1, tokens - num_decoding * (1 + timed.num_drafts)), length)
        lengths = [length] * whole + [rest] * (rest > 0)
        contexts = self._contexts(num_decoding)
        timed.prompt_seconds(lengths, contexts)
        self._capture_met_sizes()
        return median(self._device(timed.prompt_seconds(lengths, contexts)) for _ in range(REPEATS))

    def _capture_met_sizes(self) -> None:
        """Let the worker capture the batch sizes for which it had no graph, as it does while a server is idle.
        Otherwise the next larger graphs would run, and their times would be measured."""
        while self._worker.command(PrepareIdle(IDLE_SECONDS)).result() is not None:
            pass

    def _short(self, tokens: int, most_requests: int | None = None) -> int:
        """The length of each short prompt, if all of them together have `tokens` tokens. It is longer if few requests
        may run at once."""
        fewest = -(-tokens // max(1, most_requests or self._limits.max_requests - 1))
        return min(max(SHORT_PROMPT, fewest), tokens, self._limits.max_len - 1)


def rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """Make the seconds rise with the number of tokens: a step that took longer than a larger one was disturbed by other
    programs."""
    return tuple(accumulate(reversed(seconds), min))[::-1]


def reading_costs(by_window: Mapping[int | None, int], first: float, later: float) -> tuple[ReadCost, ...]:
    """The cost of reading a token of context, divided by the bytes that layers keep of it. first: seconds per byte for
    the first MIDDLE_CONTEXT tokens; later: for the tokens after them."""
    later = min(first, max(0.0, later))
    costs: dict[int | None, float] = {}
    for window, size in by_window.items():
        for visible, each in ((window, later), (min(window or MIDDLE_CONTEXT, MIDDLE_CONTEXT), first - later)):
            costs[visible] = costs.get(visible, 0.0) + size * each
    return tuple(ReadCost(window, seconds) for window, seconds in costs.items())


def _bytes_by_window(layout: CacheLayout) -> dict[int | None, int]:
    """The bytes that attention reads of a token of context, summed over layers with the same window."""
    found: dict[int | None, int] = {}
    for group in layout.groups:
        window = group.spec.visible_tokens
        found[window] = found.get(window, 0) + len(group.layers) * group.spec.token_bytes
    return found


def run(args: argparse.Namespace) -> int:
    check_result_file(args.output, "--output")
    config = engine_config(args, speculative_config=None).for_streams()
    start = time.perf_counter()
    engine = start_engine(config, in_process=True)
    print(f"ready after {time.perf_counter() - start:.1f} s", flush=True)
    try:
        table = CostBench(engine, config, lambda line: print(line, flush=True)).measure(config.model)
    finally:
        engine.close()
    table.save(Path(args.output))
    facts = table.model
    print(f"weights {facts.weight_bytes / 2**20:.0f} MiB, memory {facts.bandwidth / 1e9:.0f} GB/s, products "
          f"{facts.operations / 1e12:.3g} TFLOP/s; host {table.host.step * 1e3:.2f} ms a step and "
          f"{table.host.request * 1e6:.1f} us for each request")
    if config.speculative is not None and not table.acceptance:
        print("how often drafts are accepted depends on the text: give it to `outrider simulate` by --acceptance")
    print(f"wrote {args.output}")
    return 0
