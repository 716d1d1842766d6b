"""InputPart: what a prompt gives by something other than token ids, such as vectors in place of embeddings. No torch.

A feature makes the parts of a request from the prompt (`engine/input_reader.py`). The core calls every part of every
request and does not know the features: positions are those of the prompt's tokens, whose ids hold the places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outrider.core.feature_parts import RequestPart

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from outrider.core.uncaptured import Uncaptured


class InputVectors(NamedTuple):
    """Vectors in place of the embeddings of token ids, as the model's own embedding would return them."""

    positions: NDArray[np.int64]  # [vectors], rising
    values: NDArray[np.floating]  # [vectors, hidden size], float32 or float64


class InputPart(RequestPart):
    """The part of a request that gives some of its inputs. A subclass overrides the methods that it needs. It is sent
    to the worker with the request."""

    __slots__ = ()

    def vectors(self, start: int, end: int) -> InputVectors | None:
        """The vectors at positions [start, end). Parts of one request give no two vectors for a position."""
        return None

    def why_uncaptured(self, start: int, end: int) -> Uncaptured | None:
        """Why no captured step computes the tokens [start, end). None: the step needs nothing of this part. A part
        that is not needed any more from some position on is dropped."""
        return None
