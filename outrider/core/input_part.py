"""InputPart: inputs of a prompt in addition to its token ids, for ranges of its tokens. No torch.

A part may give vectors in place of the embeddings of tokens, let the tokens of a range see each other in both
directions, or both. A feature makes the parts of a request from its prompt (`engine/input_reader.py`). The scheduler,
the cache and the steps use all of them through this interface. Positions are those of the prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from outrider.core.feature_parts import RequestPart

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class InputVectors(NamedTuple):
    """Vectors in place of the embeddings of token ids, as the model's own embedding would return them."""

    positions: NDArray[np.int64]  # [vectors], rising
    values: NDArray[np.floating]  # [vectors, hidden size], float32 or float64


class InputPart(RequestPart):
    """The part of a request that has inputs in addition to its token ids. A subclass overrides the methods that it
    needs. The part is sent to the worker with the request."""

    __slots__ = ()

    def page_content(self, start: int, end: int, token_ids: Sequence[int]) -> Sequence[int]:
        """Return integers for everything that the keys and values of tokens [start, end) depend on, except the token
        ids up to `end`. They become part of the hash of a page with these tokens. token_ids: at least the whole
        prompt."""
        return ()

    def last_cut(self, position: int) -> int:
        """Return the last position, at most this one, at which a chunk or a prefix hit may end."""
        return position

    def next_cut(self, position: int) -> int:
        """Return the first position, at least this one, at which a chunk may end."""
        return position

    def resume_points(self) -> Iterable[int]:
        """Positions from which other prompts often go on differently, such as the end of an image. Recurrent states are
        kept at the last page boundary before each, as far as there is room."""
        return ()

    def vectors(self, start: int, end: int) -> InputVectors | None:
        """Return the vectors at positions [start, end). At most one part of a request has a vector for a position."""
        return None

    def encoded_ranges(self, start: int, end: int) -> Iterable[tuple[int, int]]:
        """Return the ranges within [start, end) whose vectors the feature's `InputEncoder` computes on the device."""
        return ()

    def rope_positions(self, start: int, end: int) -> NDArray[np.int64] | None:
        """Return the positions [3, end - start] by which ropes of several components rotate the tokens [start, end).
        None if they are the tokens' positions plus `rope_shift`, as for all generated tokens."""
        return None

    @property
    def rope_shift(self) -> int:
        """Return the number that is added to a generated token's position for ropes of several components."""
        return 0

    def two_way_ranges(self, start: int, end: int) -> Iterable[tuple[int, int]]:
        """Return the ranges within [start, end) whose tokens attend to each other in both directions. No chunk and no
        prefix hit may end inside a range, each fits into one step, and ranges of a request do not overlap. The engine
        must support them (`ServedModel.takes_extra_keys`, `longest_range`)."""
        return ()


class InputParts(tuple[InputPart, ...]):
    """All input parts of one request. Each method combines the answers of the parts."""

    __slots__ = ()

    def page_content(self, start: int, end: int, token_ids: Sequence[int]) -> list[int]:
        return [number for part in self for number in part.page_content(start, end, token_ids)]

    def last_cut(self, position: int) -> int:
        """Return the last position, at most this one, at which all parts allow a chunk or a prefix hit to end."""
        return _moved(position, [part.last_cut for part in self])

    def next_cut(self, position: int) -> int:
        """Return the first position, at least this one, at which all parts allow a chunk to end."""
        return _moved(position, [part.next_cut for part in self])

    def resume_points(self) -> set[int]:
        return {point for part in self for point in part.resume_points()}

    def chunk(self, start: int, length: int, most: int) -> int:
        """Return the number of tokens of the next chunk, which begins at `start` and must end at an allowed position.
        Preferably that is the first allowed position from `length` tokens on. If that makes more than `most` tokens, it
        is the last allowed one before `length` tokens. 0 if there is none."""
        longer = self.next_cut(start + length) - start
        return longer if longer <= most or longer == length else self.last_cut(start + length) - start


def _moved(position: int, moves: Sequence[Callable[[int], int]]) -> int:
    """Apply all moves to a position repeatedly, until none changes it: then all parts allow the position."""
    before = -1
    while position != before:
        before = position
        for move in moves:
            position = move(position)
    return position


NO_INPUTS = InputParts()
