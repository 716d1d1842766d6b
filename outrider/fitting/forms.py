"""Form: a choice of quantization for weights and KV cache. Forms are ordered by how much they raise the perplexity, as
measured in docs/benchmarks.md ("Quality of formats")."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.config import EngineConfig

WEIGHTS, CACHE = "quantization", "kv_cache_dtype"
# How many times as large the perplexity becomes, on SmolLM2-135M and on Gemma 3 270M.
MEASURED: dict[tuple[str, str], tuple[float, float]] = {
    (CACHE, "fp8"): (1.0086, 1.0055),
    (WEIGHTS, "fp8"): (1.0145, 1.0154),
    (WEIGHTS, "int4"): (1.0003, 1.1020),
}
PAGE = "docs/benchmarks.md#quality-of-formats"
USUAL_CONTEXT = 32_768  # tokens: fp8 is worth its rounding for contexts up to this
SHORT_CONTEXT = 8_192  # 4 bits are worth theirs up to this


@dataclass(frozen=True)
class Form:
    """A choice of the settings `quantization` and `kv_cache_dtype`. None keeps the user's value of a setting."""

    weights: str | None = None
    cache: str | None = None

    def apply(self, config: EngineConfig) -> EngineConfig:
        if self.weights is not None:
            config = replace(config, quantization=self.weights)
        return config if self.cache is None else replace(config, kv_cache_dtype=self.cache)

    @property
    def rounded(self) -> list[tuple[str, str]]:
        """The names and values of the settings that this form changes. Each of them rounds weights or cache."""
        return [(name, value) for name, value in ((CACHE, self.cache), (WEIGHTS, self.weights)) if value is not None]

    @property
    def loss(self) -> float:
        """Return the relative growth of the perplexity, such as 0.01, in the worst measurement of each setting."""
        return sum(max(MEASURED[each]) - 1 for each in self.rounded)

    @property
    def worth_context(self) -> int:
        """Return the longest context that justifies this form's rounding. When plans are compared, a longer context
        counts no more than this one."""
        return SHORT_CONTEXT if self.weights == "int4" else USUAL_CONTEXT

    def cost(self) -> str:
        """Say in words how much quality the rounding costs."""
        if not self.rounded:
            return "nothing is rounded"
        return (f"{self.brief_cost()} on two small models ({PAGE}); this model was not measured: `outrider bench "
                "quality` does it")

    def brief_cost(self) -> str:
        if not self.rounded:
            return "nothing is rounded"
        return "; ".join(f"{name}={value}: perplexity {_percent(MEASURED[name, value])}"
                         for name, value in self.rounded)


def _percent(factors: tuple[float, float]) -> str:
    low, high = (f"{100 * (factor - 1):.1f}" for factor in sorted(factors))
    return f"+{low} to {high}%"


def forms_for(config: EngineConfig, *, on_gpu: bool, converts_to_fp8: bool) -> list[Form]:
    """Return the forms that may be chosen, the one with the least quality loss first. Settings that the user gave are
    kept."""
    weights: list[str | None] = [None]
    if config.quantization is None and config.keep_quantized and not config.adapt_drafter:
        weights += ["fp8", "int4"] if converts_to_fp8 else []  # codes have kernels on such GPUs alone
    caches: list[str | None] = [None]
    if config.kv_cache_dtype == EngineConfig.kv_cache_dtype and on_gpu and converts_to_fp8:
        caches.append("fp8")
    return sorted((Form(own, cache) for own in weights for cache in caches), key=lambda form: form.loss)
