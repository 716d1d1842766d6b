"""Image files for tests: good ones of every kind, and files that try to harm a server."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

WRITTEN = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Noise without symmetry, so that every turn of it is another picture."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def written(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(height: int = 5, width: int = 7, seed: int = 0) -> bytes:
    return written(Image.fromarray(picture(height, width, seed)))


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_zeros(width: int, height: int) -> bytes:
    """A grey PNG whose pixels are a few bytes for every million."""
    packer = zlib.compressobj(9)
    row = bytes(1 + min(width, 1 << 17))
    pixels = b"".join(packer.compress(row) for _ in range(min(height, 100))) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def webp_with_canvas(width: int, height: int) -> bytes:
    """A WEBP file that declares a large canvas and is otherwise good."""
    small = written(Image.new("RGBA", (8, 8), (1, 2, 3, 4)), "WEBP", save_all=True, duration=9,
                    append_images=[Image.new("RGBA", (8, 8))])
    place = small.index(b"VP8X") + 12
    return small[:place] + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little") + small[place + 6 :]


def hostile(number: int) -> bytes:
    """The file of a number: one of a dozen kinds, each with random details."""
    draw = random.Random(number)
    image = Image.fromarray(picture(draw.randint(1, 40), draw.randint(1, 40), number))
    kind = draw.choice(WRITTEN)
    good = written(image, kind)
    match number % 12:
        case 0:  # cut off
            return good[: draw.randint(0, len(good) - 1)]
        case 1:  # bytes replaced
            return damaged(good, draw, draw.randint(1, 30))
        case 2:  # a bomb
            return png_of_zeros(draw.randint(9000, 2**31 - 1), draw.randint(9000, 2**31 - 1))
        case 3:  # fewer pixels than the header says
            return png_of_zeros(draw.randint(1, 2000), 8000)
        case 4:
            return webp_with_canvas(draw.randint(1, 1 << 24), draw.randint(1, 1 << 24))
        case 5:  # of a format that is not allowed
            other = draw.choice(("TIFF", "ICO", "PPM", "TGA", "EPS", "PDF", "PCX", "JPEG2000", "AVIF"))
            return written(image, other)
        case 6:  # no image at all
            return draw.choice([b"", b"\0", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"GIF89a", b"BM" + bytes(60),
                                b"%!PS\n/x 9999999 string def", draw.randbytes(draw.randint(1, 3000))])
        case 7:  # an animation
            frames = [Image.fromarray(picture(9, 9, seed)) for seed in range(draw.randint(2, 30))]
            return written(frames[0], draw.choice(("GIF", "WEBP", "PNG")), save_all=True, append_images=frames[1:])
        case 8:  # EXIF that is none
            exif = b"Exif\0\0" + draw.choice([b"II*\0", b"MM\0*"]) + draw.randbytes(draw.randint(0, 200))
            return written(image, draw.choice(("JPEG", "WEBP", "PNG")), exif=exif)
        case 9:  # chunks with lengths of their own
            pieces = [chunk(draw.choice([b"tEXt", b"zTXt", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"tRNS"]),
                            draw.randbytes(draw.randint(0, 90))) for _ in range(draw.randint(1, 40))]
            whole = written(image)
            return whole[:33] + b"".join(pieces) + whole[33:]
        case 10:  # a text that unpacks to much more
            return written(image)[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 23))) + written(image)[33:]
        case _:  # sizes in headers
            return damaged(good, draw, 4, most=40)


def damaged(data: bytes, draw: random.Random, num: int, most: int | None = None) -> bytes:
    changed = bytearray(data)
    for _ in range(num):
        changed[draw.randrange(min(len(changed), most or len(changed)))] = draw.randrange(256)
    return bytes(changed)
