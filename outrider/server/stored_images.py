"""StoredImages: the images in the items of stored responses. Each image is kept once, even if several items contain it.

A conversation is stored again with every turn, and clients send its images again with every turn. So the JSON of an
item contains, in place of an image, a mark with the image's digest. Marks are only replaced where they are the whole
value of `image_url`, which a client's text cannot be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from outrider.server.errors import ApiError

LEAST = 1 << 10  # characters of a URL that is kept apart from its item
MAX_LIVE_BYTES = 128 << 20  # of the images of one key, in stored responses and in those that run


class StoredImage:
    """One image, in the form of the URL that the client sent."""

    __slots__ = ("__weakref__", "digest", "url")

    def __init__(self, digest: str, url: bytes) -> None:
        self.digest, self.url = digest, url

    @property
    def _mark(self) -> bytes:
        return b'"image_url":"image:%s"' % self.digest.encode()

    def restored_in(self, json: bytes) -> bytes:
        """Return an item's JSON in which the marks of this image are replaced by the image."""
        return json.replace(self._mark, b'"image_url":"%s"' % self.url)


class StoredImages:
    """The stored images by digest, for each API key. An image is dropped with the last item that contains it."""

    def __init__(self) -> None:
        self._live: dict[str | None, WeakValueDictionary[str, StoredImage]] = {}

    def take_from(self, item: dict[str, Any], tenant: str | None) -> tuple[dict[str, Any], tuple[StoredImage, ...]]:
        """Return the item with marks for its images, and the images."""
        images: dict[str, StoredImage] = {}
        changed = dict(item)
        for name in ("content", "output"):
            if isinstance(item.get(name), list):
                changed[name] = [self._marked(part, tenant, images) for part in item[name]]
        return changed, tuple(images.values())

    def check_room(self, tenant: str | None) -> None:
        """Refuse the request if the images of this key already take too much memory."""
        if sum(len(image.url) for image in self._live.get(tenant, {}).values()) > MAX_LIVE_BYTES:
            raise ApiError(429, f"responses of this key with more than {MAX_LIVE_BYTES} bytes of images are stored or "
                                "running: try again later, or set store to false", retry_after=1)

    def _marked(self, part: Any, tenant: str | None, images: dict[str, StoredImage]) -> Any:
        url = part.get("image_url") if isinstance(part, dict) else None
        if not isinstance(url, str) or len(url) < LEAST or not url.startswith("data:") or '"' in url or "\\" in url:
            return part
        if not url.isascii():
            return part  # the image is refused when it is read
        data = url.encode()
        digest = hashlib.sha256(data).hexdigest()
        live = self._live.setdefault(tenant, WeakValueDictionary())
        images[digest] = live.setdefault(digest, StoredImage(digest, data))
        return part | {"image_url": f"image:{digest}"}


def distinct_bytes(images: Iterable[StoredImage]) -> int:
    """Return the bytes of images, each counted once."""
    return sum({image.digest: len(image.url) for image in images}.values())
