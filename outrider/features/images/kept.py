"""KeptFeatures: features of encoded images, kept until no step needs them, and longer where there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace

from outrider.models.vision.base import ImageFeatures

HOST_BYTES = 2 << 30  # of features that found no room on the device


class KeptFeatures:
    """Features by digest, those that were used last at the end. The device has room for `room` tokens, or for one
    larger image. If prompts that are computed in turns need more, their features wait in the host's memory, so that
    each image is encoded once. Features that no prompt waits for are dropped first, and never go to the host."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._near: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._far: OrderedDict[bytes, ImageFeatures] = OrderedDict()  # on the host
        self._awaited: set[bytes] = set()  # images with tokens that are not computed yet

    def expect(self, awaited: Collection[bytes]) -> None:
        """Say which images steps still need, this step among them."""
        self._awaited = set(awaited)
        for digest in self._far.keys() - self._awaited:
            del self._far[digest]

    def get(self, digest: bytes) -> ImageFeatures | None:
        for kept in (self._near, self._far):
            if digest in kept:
                kept.move_to_end(digest)
                return kept[digest]
        return None

    def add(self, digest: bytes, num_tokens: int, make: Callable[[], ImageFeatures]) -> ImageFeatures:
        """Make an image's features, after room for them was made."""
        while self._near and sum(len(own.features) for own in self._near.values()) + num_tokens > self._room:
            self._take_away(next((own for own in self._near if own not in self._awaited), next(iter(self._near))))
        self._near[digest] = made = make()
        self._awaited.add(digest)
        return made

    def clear(self) -> None:
        self._near.clear()
        self._far.clear()

    def _take_away(self, digest: bytes) -> None:
        gone = self._near.pop(digest)
        if digest not in self._awaited:
            return
        self._far[digest] = replace(gone, features=gone.features.cpu(),
                                    deepstack=tuple(own.cpu() for own in gone.deepstack))
        while sum(own.num_bytes for own in self._far.values()) > HOST_BYTES:
            self._far.popitem(last=False)
