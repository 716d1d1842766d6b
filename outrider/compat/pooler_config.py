"""PoolerConfig: vLLM's default pooling. Here each request's parameters choose the pooling."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class PoolerConfig:
    """vLLM's setting of the default pooling. It is accepted if it equals the default of PoolingParams."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None


SAME_POOLING: dict[str, tuple[Any, ...]] = {
    "task": (None, "embed", "token_embed"),
    "pooling_type": (None, "LAST"),
    "seq_pooling_type": (None, "LAST"),
    "tok_pooling_type": (None, "ALL"),
    "normalize": (None, True),
    "use_activation": (None, True),
    "enable_chunked_processing": (None, False, True),
}


def pooling_refused(given: Any) -> str | None:
    """Return the field of a PoolerConfig, or of an equivalent dict, that asks for another pooling than the default.
    None if there is none."""
    if given is None:
        return None
    if isinstance(given, PoolerConfig):
        asked = {field.name: getattr(given, field.name) for field in fields(PoolerConfig)}
    elif isinstance(given, dict):
        asked = given
    else:
        return "a PoolerConfig or a dict is needed"
    for name, value in asked.items():
        if value not in SAME_POOLING.get(name, (None,)):
            return (f"{name}={value!r} is not the default here: give PoolingParams(pooling='last', 'mean' or 'all', "
                    "normalize=..., dimensions=...) to LLM.embed, LLM.score or LLM.encode")
    return None
