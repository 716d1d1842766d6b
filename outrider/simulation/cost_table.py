"""CostTable: the times of one engine's steps on one machine, measured by `outrider bench costs`.

The table also contains the worker's report about itself: limits, cache layout, pages, and the costs from which the
scheduler decides. With these a simulated engine makes the same decisions as the measured one."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from outrider.core import ScheduledBatch
from outrider.core.costs import ReadCost, interpolate
from outrider.core.fields import INT64, Count, Range
from outrider.runner.interface import BoundedSteps, MeasuredDrafting, WorkerInfo
from outrider.simulation.places import PlaceCosts
from outrider.simulation.plain_data import from_plain, to_plain

MOST_REQUESTS = 1 << 30
FORMAT = "outrider costs 1"
Seconds: TypeAlias = Annotated[float, Range(0.0, 1e6)]
Chance: TypeAlias = Annotated[float, Range(0, 1)]
Amount: TypeAlias = Annotated[int, Range(1, INT64)]
Speed: TypeAlias = Annotated[float, Range(1e-3, 1e30)]


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of the model and speeds of the device, from which steps of several tensor-parallel ranks are estimated."""

    name: str
    weight_bytes: Amount  # weights that a decode step reads
    token_operations: Amount  # operations of one token's products; a multiplication and an addition are two
    num_layers: Count
    hidden_size: Count
    itemsize: Count  # bytes of one number of a hidden state
    bandwidth: Speed  # bytes per second of reading the device's memory
    operations: Speed  # operations per second of a large product


@dataclass(frozen=True)
class HostCosts:
    """Seconds that the engine's thread on the host takes for a step and for each request."""

    step: Seconds  # for one step, whatever its requests
    request: Seconds  # for each request of a step
    start: Seconds = 0.0  # from a request's arrival until the engine can schedule it
    latency: Seconds = 0.0  # between the device and the engine's thread, there and back: hidden while steps are queued


@dataclass(frozen=True)
class DecodeSteps:
    """Seconds of steps in which every request decodes, by the number of requests. All requests have the same number of
    drafts. The time to read contexts is not included."""

    num_drafts: int
    requests: tuple[Count, ...]
    seconds: tuple[Seconds, ...]


@dataclass(frozen=True)
class PromptSteps:
    """Seconds of steps with prompts, by the number of tokens in the step. The time of attention is not included.

    num_drafts: the number of drafts that the step proposes for the next step.
    """

    num_drafts: int
    tokens: tuple[Count, ...]
    seconds: tuple[Seconds, ...]
    padded_up_to: int = 0  # captured steps: one of at most so many tokens takes the time of the next larger size
    requests: Count = MOST_REQUESTS  # at most so many in a step: captured steps are padded to numbers of requests too

    def step(self, num_tokens: int) -> float:
        if num_tokens <= self.padded_up_to:
            return self.seconds[bisect_left(self.tokens, num_tokens)]
        return interpolate(self.tokens, self.seconds, num_tokens)


@dataclass(frozen=True)
class CostTable:
    model: ModelFacts
    info: WorkerInfo
    host: HostCosts
    decoding: tuple[DecodeSteps, ...]  # by rising numbers of drafts, from none on
    prompts: tuple[PromptSteps, ...]  # likewise, and by rising numbers of requests
    reading: tuple[ReadCost, ...] = ()  # seconds for each token of context that a request decodes behind
    attending: tuple[ReadCost, ...] = ()  # seconds for each pair of a prompt's token and a key that the token sees
    acceptance: tuple[Chance, ...] = ()  # chance that a draft is accepted if those before it were, by position
    submits_early: bool = False  # with one step in flight: the next is submitted before new requests are looked at
    enable_prefix_caching: bool = True
    places: tuple[PlaceCosts, ...] = ()  # beyond the device, in the order in which they are asked for pages

    def step(self, batch: ScheduledBatch) -> float:
        """Return the seconds that the device takes for a batch."""
        num_decoding = num_drafts = num_prompt = 0
        contexts: list[int] = []
        attention = 0.0
        for known, drafts, samples, bound in zip(batch.num_known, batch.num_drafts, batch.samples, batch.bounds,
                                                 strict=True):
            if known == 1 and samples:
                num_decoding += 1
                num_drafts += drafts
                contexts.append(bound)
            else:
                num_prompt += known
                attention += self._attend(known, bound - known)
        seconds = self.decode(num_decoding, num_drafts) if num_decoding else 0.0
        if num_prompt:
            own = self.prompt_steps(len(batch.num_known), proposes=batch.drafting.num_wanted > 0)
            tokens = num_decoding + num_drafts + num_prompt
            seconds = max(seconds, own.step(tokens)) + attention
        for cost in self.reading:
            seconds += cost.seconds * visible(contexts, cost.window)
        return seconds

    def prompt_steps(self, num_requests: int, *, proposes: bool) -> PromptSteps:
        """Return the measured times that apply to a step with prompts and `num_requests` requests. proposes: whether
        the step also proposes drafts for the next step."""
        num_drafts = self.prompts[-1 if proposes else 0].num_drafts
        fitting = [own for own in self.prompts if own.num_drafts == num_drafts]
        return next((own for own in fitting if own.requests >= num_requests), fitting[-1])

    def decode(self, num_requests: int, num_drafts: int) -> float:
        """Seconds of a step in which all requests decode, with `num_drafts` drafts over all requests. The time to read
        contexts is not included."""
        key = num_requests, num_drafts
        seconds = self._decoded.get(key)
        if seconds is None:
            counts = [own.num_drafts for own in self.decoding]
            known = [interpolate(own.requests, own.seconds, num_requests) for own in self.decoding]
            scaled = [count * num_requests for count in counts]  # so that a mean number of drafts is an integer here
            seconds = self._decoded[key] = interpolate(scaled, known, num_drafts)
        return seconds

    def host_seconds(self, num_requests: int) -> float:
        """Seconds between a step's result and the submission of the next step."""
        return self.host.step + self.host.request * num_requests

    @cached_property
    def _decoded(self) -> dict[tuple[int, int], float]:
        return {}

    def _attend(self, num_tokens: int, context: int) -> float:
        keys = context + (num_tokens + 1) / 2  # in the mean
        return num_tokens * sum(cost.seconds * (keys if cost.window is None else min(keys, cost.window))
                                for cost in self.attending)

    # The file

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **to_plain(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> CostTable:
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a cost table: {error}. Make one with `outrider bench costs "
                             "MODEL -o FILE`") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a cost table (its format is not {FORMAT!r}): make one with `outrider "
                             "bench costs MODEL -o FILE`")
        try:
            table = from_plain(content, (cls, ModelFacts, HostCosts, DecodeSteps, PromptSteps, PlaceCosts))
            if not isinstance(table, cls):
                raise ValueError(f"the file holds a {type(table).__name__}, not a cost table")
            table.check()
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a usable cost table: {error}. Make it again with `outrider bench costs "
                             "MODEL -o FILE`") from None
        return table

    def check(self) -> None:
        """Raise ValueError for impossible numbers, which would make a simulation fail later."""
        limits, drafting, prompt_steps = self.info.limits, self.info.drafting, self.info.prompt_steps
        least = {"max_requests": 1, "max_batched_tokens": 1, "max_len": 2, "max_drafts": 0, "steps_in_flight": 1}
        for name, low in least.items():
            if getattr(limits, name) < low:
                raise ValueError(f"limits: {name} must be at least {low}, got {getattr(limits, name)}")
        for name, low in {"num_pages": 2, "lookahead": 0}.items():
            if getattr(self.info, name) < low:
                raise ValueError(f"info: {name} must be at least {low}, got {getattr(self.info, name)}")
        if [own.num_drafts for own in self.decoding] != list(range(limits.max_drafts + 1)):
            raise ValueError(f"decoding must have one entry for each num_drafts from 0 to {limits.max_drafts} (limits: "
                             f"max_drafts), got {[own.num_drafts for own in self.decoding]}")
        groups = self.info.layout.groups
        if not groups:
            raise ValueError("layout: groups must not be empty")
        if (fewest := min(group.page_tokens for group in groups)) < 1:
            raise ValueError(f"layout: page_tokens of a group must be at least 1, got {fewest}")
        if not self.prompts or not {own.num_drafts for own in self.prompts} <= {0, limits.max_drafts}:
            raise ValueError(f"prompts must not be empty, and each num_drafts must be 0 or {limits.max_drafts} "
                             f"(limits: max_drafts), got {[own.num_drafts for own in self.prompts]}")
        for decoded in self.decoding:
            _check_points(f"decoding with {decoded.num_drafts} drafts: requests", decoded.requests, decoded.seconds)
        order = [(own.num_drafts, own.requests) for own in self.prompts]
        if order != sorted(set(order)):
            raise ValueError(f"prompts must be sorted by num_drafts and requests, without repeats, got {order}")
        for prompts in self.prompts:
            _check_points(f"prompts with {prompts.num_drafts} drafts: tokens", prompts.tokens, prompts.seconds)
            if prompts.padded_up_to > prompts.tokens[-1]:
                raise ValueError(f"prompts: padded_up_to ({prompts.padded_up_to}) must not exceed the last entry "
                                 f"of the list 'tokens' ({prompts.tokens[-1]})")
        if isinstance(drafting, MeasuredDrafting):
            _check_points("drafting: tokens", drafting.costs.tokens, drafting.costs.seconds)
        if isinstance(prompt_steps, BoundedSteps):
            _check_points("prompt_steps: tokens", prompt_steps.costs.tokens, prompt_steps.costs.seconds)
        for name, costs in (("reading", self.reading), ("attending", self.attending)):
            if any(cost.seconds < 0 or (cost.window is not None and cost.window < 1) for cost in costs):
                raise ValueError(f"{name}: seconds must be at least 0, and window at least 1, got "
                                 f"{[(cost.seconds, cost.window) for cost in costs]}")


def _check_points(name: str, at: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    if not at or list(at) != sorted(set(at)) or len(at) != len(seconds) or min(seconds) < 0:
        raise ValueError(f"{name} must be rising numbers with as many seconds, all at least 0, got {list(at)} and "
                         f"{list(seconds)}")


def visible(contexts: list[int], window: int | None) -> int:
    """Count the context tokens to which requests of these lengths attend, over all requests."""
    return sum(contexts) if window is None else sum(min(length, window) for length in contexts)
