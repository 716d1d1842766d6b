"""Parts that features add to the core's data: parts of a request, of a batch, of results and of the limits. No torch.

A part is plain data that can be pickled; its class is defined in the feature's folder. A request, batch or result has
at most one part of each type, and only parts of the features that it uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple, TypeVar


class BatchPart:
    """A message that a feature's code in the engine sends to its code in the worker, together with one step's batch."""

    __slots__ = ()


class RequestPart:
    """The part of a request that concerns one feature. The feature defines the subclass."""

    __slots__ = ()
    # Whether the feature decides which tokens may be sampled: it writes a mask for each logit row of the request, when
    # the host has its turn in a step (`runner/host_turn.py`).
    masks_tokens: ClassVar[bool] = False
    # Whether these masks decide where the text may end: they allow an end id only there. The request then ends with one
    # in spite of `ignore_eos`, and `min_tokens` is left to the feature.
    decides_end: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[bool] = False  # whether every token of the prompt must be computed, without hits
    adds_to_samples: ClassVar[bool] = False  # whether it is an AddingPart (`core/sample_addition.py`)

    @property
    def cache_key(self) -> str | None:
        """A text that must be equal for requests to share pages. None if the feature does not change keys and values in
        the cache."""
        return None


class LimitsPart:
    """Sizes of a feature's buffers."""

    __slots__ = ()
    takes_images: ClassVar[bool] = False  # whether prompts may have images, which the feature then reads

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Return the tokens that stand for other inputs in prompts, and that no text contains."""
        return ()


class Figure(NamedTuple):
    """One number of a feature's report, for metrics."""

    name: str
    help_text: str
    value: float
    is_count: bool = True  # it only grows, from the start of the engine
    label: str = ""  # what sets it apart from neighbours of the same name, as 'reason="slow"'


class ResultPart:
    """A report that a feature's code in the worker sends with the result of a step. The engine keeps the last report of
    each type."""

    __slots__ = ()

    def figures(self) -> tuple[Figure, ...]:
        """The numbers of the report that metrics show."""
        return ()


Part = TypeVar("Part")


def find_part(parts: Iterable[object], kind: type[Part]) -> Part | None:
    """Return the part of this type, or None."""
    return next((part for part in parts if isinstance(part, kind)), None)
