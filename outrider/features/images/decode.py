"""Decodes images to RGB arrays by fixed rules, so that the result does not depend on the library that a client uses.

- Formats: PNG, JPEG, WEBP, GIF and BMP. Only the first frame of an animation is decoded.
- The size is read and checked before any pixel is decoded.
- The EXIF orientation of a file is applied. A PIL image or an array is taken as it is.
- Transparency is composited on white. 16-bit values are cut to their high byte. Palettes, grey and CMYK become RGB
  without colour profiles.
- Every error in a file raises a ValueError that describes it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from outrider.core.fields import shown
from outrider.features.images.limits import DEFAULT_LIMITS, ImageLimits, ImageRefused

Rgb: TypeAlias = NDArray[np.uint8]  # [height, width, 3]
Made = TypeVar("Made")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
ORIENTATION = 0x0112  # tag of EXIF
TURNS = {  # by EXIF orientation; 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
WHITE = (255, 255, 255)
SLOW_CODECS = ("bmp_rle",)  # of PIL, in Python: a few bytes would keep a thread busy for long
MAX_SCANS = 64  # of a JPEG file: each takes time for all pixels, and may be 16 bytes long
JPEG_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")  # not one of those within a scan
SCAN, END, ALONE = 0xDA, 0xD9, (0x01, 0xD8)  # markers: a scan, the end, and those without a length
UNREADABLE = (f"an image cannot be read: send a whole file of one of the formats {', '.join(FORMATS)}")


def to_rgb(value: Any, limits: ImageLimits = DEFAULT_LIMITS) -> list[Rgb]:
    """Convert an image, or a list of images, to RGB arrays. An image is a PIL image, a uint8 array [height, width, 3 or
    4] or [height, width], or the bytes of a file. limits: for files only; arrays and PIL images are in memory
    already."""
    return [_one_to_rgb(each, limits) for each in (value if isinstance(value, (list, tuple)) else [value])]


def image_size(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[int, int]:
    """Return the width and height of an image file, without decoding it. Raise ValueError if they are not allowed."""
    return _readable(lambda: _opened(data, limits).size)


def decode(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Rgb:
    """Decode an image file."""

    def work() -> Rgb:
        image = _opened(data, limits)
        image.load()
        turn = TURNS.get(_orientation(image))
        rgb = _in_rgb(image)
        return np.array(rgb if turn is None else rgb.transpose(turn))

    return _readable(work)


def _one_to_rgb(value: Any, limits: ImageLimits) -> Rgb:
    match value:
        case bytes() | bytearray() | memoryview():
            return decode(bytes(value), limits)
        case Image.Image() if min(value.size) > 0:
            return np.array(_readable(lambda: _in_rgb(value)))
        case np.ndarray():
            return _array_to_rgb(value)
    raise ValueError(f"an image must be a PIL image, a numpy array of uint8 [height, width, 3], or the bytes of a "
                     f"file, got {shown(value)}")


def _array_to_rgb(value: NDArray[Any]) -> Rgb:
    is_image = value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4))
    if value.dtype != np.uint8 or not value.size or not is_image:
        raise ValueError("an image as an array must be of uint8, [height, width, 3], [height, width, 4] or [height, "
                         f"width], got {value.dtype} of shape {list(value.shape)}")
    if value.ndim == 3 and value.shape[2] == 3:
        return np.ascontiguousarray(value)
    return np.array(_in_rgb(Image.fromarray(np.ascontiguousarray(value))))


def _readable(work: Callable[[], Made]) -> Made:
    """Call `work`, and raise one ValueError for all errors of PIL, which raises a dozen types for damaged files."""
    try:
        return work()
    except ImageRefused:
        raise
    except Exception as error:
        raise ValueError(UNREADABLE) from error


def _opened(data: bytes, limits: ImageLimits) -> Image.Image:
    """Open an image file without decoding its pixels."""
    limits.check_bytes(len(data))
    size = _webp_size(data)  # PIL allocates the canvas of a WEBP file when it opens it
    if size is not None:
        limits.check_size(*size)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise limits.too_large("an image") from None
    limits.check_size(*image.size)
    if _has_many_scans(data):
        raise ImageRefused(f"a JPEG file with more than {MAX_SCANS} scans is not supported: send it as PNG")
    if any(tile[0] in SLOW_CODECS for tile in getattr(image, "tile", ())):
        raise ImageRefused("a BMP file with run-length encoding is not supported: send it as PNG")
    return image


def _has_many_scans(data: bytes) -> bool:
    """Whether these are the bytes of a JPEG file with more than MAX_SCANS scans."""
    num_scans, place = 0, 2
    while data[:2] == b"\xff\xd8" and num_scans <= MAX_SCANS:
        found = JPEG_MARKER.search(data, place)
        if found is None or found[1][0] == END:
            return False
        place, kind = found.end(), found[1][0]
        num_scans += kind == SCAN
        if kind not in ALONE:
            place += max(2, int.from_bytes(data[place : place + 2], "big"))
    return num_scans > MAX_SCANS


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """The width and height in the header of a WEBP file. None if it is another format."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    match data[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            return (int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF)
    return None


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 if there is none, or none that can be read."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF data raises errors of many types; the pixels are good
        return 1
    return value if isinstance(value, int) else 1


def _in_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB."""
    if image.mode.startswith("I"):
        image = _high_bytes(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        own = image.convert("RGBA")
        image = Image.new("RGB", own.size, WHITE)
        image.paste(own, mask=own.getchannel("A"))
    if image.mode == "F":
        raise ImageRefused("an image of floating-point numbers is not supported: convert it to RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _high_bytes(image: Image.Image) -> Image.Image:
    """Reduce grey values of 16 bits to their high bytes. A value that means transparency becomes white."""
    values = np.asarray(image).clip(0, 0xFFFF)
    grey = (values >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey)
