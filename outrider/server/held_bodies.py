"""HeldBodies: the bytes of request bodies in memory, by tenant. They are bounded, so that one tenant cannot fill the
memory."""

from __future__ import annotations

from collections import Counter

from outrider.server.errors import ApiError

BODIES = 64  # of the largest size that requests of one tenant may hold at once
IMAGE_BODIES = 8  # the same, of the room that bodies with images have beside that


class HeldBodies:
    """Counts the bytes of bodies that are in memory, by tenant, for one event loop."""

    def __init__(self, max_body_bytes: int, image_bytes: int = 0) -> None:
        self.held: Counter[str | None] = Counter()  # bytes by tenant; none of them is 0
        self.most = BODIES * max_body_bytes + IMAGE_BODIES * image_bytes


class HeldBody:
    """Counts the bytes of one request's body as held, from the first bytes until the answer begins."""

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self._tenant: str | None = None
        self._size = 0

    def add(self, tenant: str | None, num_bytes: int) -> None:
        if not num_bytes:
            return
        self._tenant, self._size = tenant, self._size + num_bytes
        held = self._bodies.held
        held[tenant] += num_bytes
        if held[tenant] > self._bodies.most:
            raise ApiError(429, f"waiting requests of this client hold more than {self._bodies.most} bytes: try "
                                "again later", retry_after=1)

    def release(self) -> None:
        if not self._size:
            return
        held = self._bodies.held
        held[self._tenant] -= self._size
        self._size = 0
        if not held[self._tenant]:
            del held[self._tenant]
