"""Tiny models of every kind of cache, and engines over host memory and a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cache.media import MediaStats
from outrider.cache.with_media import CacheWithMedia
from outrider.core.outputs import RequestOutput
from outrider.drafters.base import Drafter
from outrider.models.base import Model
from tests.drafters import hybrid_rig, latent_rig
from tests.drafters.checkpoints import make_drafter
from tests.drafters.hybrid_rig import mtp_of
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model
from tests.engine.recurrent_rig import hybrid

PAGE = 16
HOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Kind:
    """A model, and the drafter that guesses for it if there is one."""

    model: Callable[[], Model]
    drafter: Callable[[Model], Drafter] | None = None
    head: str | None = None  # a drafter's folder, by the names of `make_drafter`
    vocab: int = 256
    settings: tuple[tuple[str, Any], ...] = ()

    def open(self, path: Path, **settings: Any) -> Rig:
        settings = dict(self.settings) | settings
        if self.head is not None:
            settings["speculative_config"] = make_drafter(self.head, "llama", path / "head").speculative(3)
        model = self.model()
        return Rig(model, drafter=None if self.drafter is None else self.drafter(model), **settings)


def two_drafts(model: Model) -> Drafter:
    return mtp_of(model, 2)


SMALL = hybrid_rig.VOCAB
KINDS = {
    "full": Kind(lambda: tiny_model("llama")),
    "full, eagle3": Kind(lambda: tiny_model("llama"), head="eagle3"),
    "full, eagle with pages of its own": Kind(lambda: tiny_model("llama"), head="eagle"),
    "full, fp8": Kind(lambda: tiny_model("llama"), settings=(("kv_cache_dtype", "fp8"),)),
    "sliding": Kind(lambda: tiny_model("sliding")),
    "full and sliding": Kind(lambda: tiny_model("gemma3")),
    "latent": Kind(lambda: latent_rig.latent_of("deepseek_v3"), vocab=SMALL),
    "latent and index": Kind(lambda: latent_rig.latent_of("deepseek_v32"), vocab=SMALL),
    "latent and index, mtp": Kind(lambda: latent_rig.latent_of("deepseek_v32"), two_drafts, vocab=SMALL),
    "latent and fp8 index": Kind(lambda: latent_rig.latent_of("deepseek_v32_fp8"), vocab=SMALL),
    "mamba2": Kind(lambda: hybrid_rig.hybrid_of("nemotron_h"), vocab=SMALL),
    "mamba2, mtp": Kind(lambda: hybrid_rig.hybrid_of("nemotron_h"), two_drafts, vocab=SMALL),
    "gated delta": Kind(lambda: hybrid_rig.hybrid_of("qwen3_5"), vocab=SMALL),
    "gated delta, mtp": Kind(lambda: hybrid_rig.hybrid_of("qwen3_5"), two_drafts, vocab=SMALL),
    "kda": Kind(lambda: hybrid("kda")),
}


def asks_of(kind: Kind, lengths: Sequence[int], max_tokens: int = 5) -> list[Ask]:
    params = greedy(max_tokens, logprobs=2)
    return [Ask(prompt_of(length, length, kind.vocab), params) for length in lengths]


Answer = tuple[list[int], list[dict[int, float]]]


def answers_of(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """Tokens and their log-probabilities."""
    return [(list(sample.token_ids), [{token: one.logprob for token, one in each.items()}
                                      for each in sample.logprobs or []])
            for output in outputs for sample in output.outputs]


def assert_equal(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for (tokens, logprobs), (right, values) in zip(found, expected, strict=True):
        assert tokens == right
        for own, other in zip(logprobs, values, strict=True):
            assert own.keys() == other.keys()
            assert all(abs(own[token] - other[token]) < 1e-9 for token in own), "float64 rounds later than that"


def cache_of(rig: Rig) -> CacheWithMedia:
    cache = rig.engine.scheduler.cache
    assert isinstance(cache, CacheWithMedia)
    return cache


def stats_of(rig: Rig) -> MediaStats:
    return cache_of(rig).media.stats


def cached_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.metrics.num_cached_tokens for output in outputs]
