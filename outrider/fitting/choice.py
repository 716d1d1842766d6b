"""FitChoice: presents the chosen plan as changed settings, as lines for people and as data for scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outrider.config import EngineConfig
from outrider.fitting.room import GIB, DeviceRoom
from outrider.fitting.search import FitPlan, Search

CHOSEN = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "quantization", "dtype",
          "enforce_eager", "packed_weights", "speculative_config", "kv_cache_memory_bytes")
ESTIMATED = "steps are estimated; an engine on a GPU measures them, and shortens the context if they take more"


@dataclass(frozen=True)
class FitChoice:
    asked: EngineConfig
    room: DeviceRoom
    plan: FitPlan
    more: tuple[FitPlan, ...]  # plans with longer contexts that lose more

    @classmethod
    def from_search(cls, asked: EngineConfig, search: Search) -> FitChoice:
        best = search.best
        more = [best]
        plans = search.plans() if best.context < best.max_positions else ()
        for plan in sorted(plans, key=lambda plan: (plan.form.loss, -plan.context, plan.pace)):
            if plan.context > more[-1].context:
                more.append(plan)
        return cls(asked, search.room, best, tuple(more[1:4]))

    @property
    def settings(self) -> dict[str, Any]:
        """The chosen settings that differ from the config that the user gave."""
        return settings_of(self.asked, self.plan, self.room)

    def command(self, program: str = "outrider serve") -> str:
        return " ".join([program, shlex.quote(self.asked.model), *flags_of(self.settings)])

    def lines(self) -> Iterator[str]:
        """Describe the plan for people: memory, context, drafts and quality, a line each."""
        plan, limits = self.plan, self.plan.limits
        used, budget = _gib(plan.total_bytes), _gib(plan.budget)
        yield f"{self.asked.model} on {self.room.name}: {used} of {budget} GiB are planned"
        weights = plan.config.quantization or "as the files have them"
        cache = plan.config.kv_cache_dtype.replace("auto", "as the model computes")
        yield f"  weights      {_gib(plan.held_bytes):>7} GiB  {weights}"
        yield (f"  cache        {_gib(plan.pool_bytes):>7} GiB  {cache}; "
               f"{plan.memory.tokens:,} tokens, {plan.full_requests} of the longest requests at once")
        yield (f"  steps, rows  {_gib(plan.other_bytes):>7} GiB  {limits.max_requests} requests at once, "
               f"{limits.max_batched_tokens:,} tokens a step")
        yield f"  context      {plan.context:,} of {plan.max_positions:,} tokens"
        yield f"  drafts       {_drafts(self.asked, plan)}"
        yield f"  quality      {plan.form.cost()}"

    def advice(self) -> Iterator[str]:
        """Say how to get a longer context: settings with more rounding or slower steps."""
        for plan in self.more:
            changed = settings_of(self.plan.config, plan, self.room) | {"max_model_len": plan.context}
            yield f"{plan.context:,} tokens of context: {' '.join(flags_of(changed))} ({plan.form.brief_cost()})"
        if not self.more and self.plan.context < self.plan.max_positions:
            yield "a longer context: more memory, fewer --max-num-seqs, or a smaller model"

    def as_dict(self) -> dict[str, Any]:
        plan, step = self.plan, self.plan.memory.step
        return {
            "model": self.asked.model, "device": self.room.name, "budget_bytes": plan.budget,
            "settings": self.settings, "command": self.command(), "max_model_len": plan.context,
            "max_positions": plan.max_positions, "max_num_seqs": plan.limits.max_requests,
            "max_num_batched_tokens": plan.limits.max_batched_tokens, "requests_of_max_model_len": plan.full_requests,
            "cache_tokens": plan.memory.tokens, "num_pages": plan.memory.num_pages, "bytes": {
                "weights": plan.memory.weight_bytes, "packed_copies": plan.memory.packed_bytes,
                "tables": plan.held_bytes - plan.memory.weight_bytes - plan.memory.packed_bytes,
                "cache": plan.pool_bytes, "largest_step": step.activation_bytes, "graphs": step.graph_bytes,
                "rows": plan.other_bytes - step.activation_bytes - step.graph_bytes, "total": plan.total_bytes},
            "quality": plan.form.cost(),
        }

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)


def settings_of(asked: EngineConfig, plan: FitPlan, room: DeviceRoom) -> dict[str, Any]:
    """Return the settings of a plan that differ from the config that the user gave. The context length is left out if
    it is the model's own. On a CPU the cache's size is always included, because an engine would otherwise choose
    another size."""
    config = plan.config
    found = {name: getattr(config, name) for name in CHOSEN if getattr(config, name) != getattr(asked, name)}
    if asked.max_model_len is None and plan.context == plan.max_positions:
        found.pop("max_model_len", None)
    if not room.is_gpu and config.fits_cache_to_device:
        found["kv_cache_memory_bytes"] = plan.pool_bytes
    return found


def flags_of(settings: dict[str, Any]) -> Iterator[str]:
    """Yield settings as command line flags, such as `--max-model-len 8192`."""
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is False:
            yield f"--no-{flag}"
        elif value is True:
            yield f"--{flag}"
        else:
            text = json.dumps(value) if isinstance(value, dict) else "none" if value is None else str(value)
            yield f"--{flag} {shlex.quote(text)}"


def _drafts(asked: EngineConfig, plan: FitPlan) -> str:
    if plan.config.speculative is not None:
        return f"up to {plan.config.speculative.num_speculative_tokens} a step ({', '.join(plan.config.draft_methods)})"
    return "left out: they do not fit" if asked.speculative is not None else "none are asked for"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
