"""Image files become RGB by stated rules, and nothing else comes of a file that breaks them."""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import pytest
from PIL import Image

from outrider.features.images.decode import decode, image_size, to_rgb
from outrider.features.images.limits import ImageLimits, ImageRefused
from tests.images.made_images import WRITTEN, hostile, picture, png, png_of_zeros, webp_with_canvas, written

RGB = picture(5, 7)


def on_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    mixed = rgb.astype(int) * alpha[..., None] + 255 * (255 - alpha.astype(int)[..., None])
    return ((mixed + 127) // 255).astype(np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_a_file_without_loss_is_its_pixels(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = written(Image.fromarray(RGB), kind, **options)
    assert np.array_equal(decode(data), RGB)
    assert image_size(data) == (7, 5)


@pytest.mark.parametrize("kind", WRITTEN)
def test_every_allowed_format_is_read(kind: str) -> None:
    flat = Image.new("RGB", (64, 48), (200, 40, 90))
    found = decode(written(flat, kind))
    assert found.shape == (48, 64, 3) and found.dtype == np.uint8
    assert np.abs(found.astype(int) - [200, 40, 90]).max() <= 8


def test_transparent_pixels_are_on_white() -> None:
    alpha = picture(5, 7, seed=1)[..., 0]
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        data = written(Image.fromarray(np.dstack([RGB, alpha])), kind, **options)
        assert np.array_equal(decode(data), on_white(RGB, alpha))


def test_grey_with_alpha() -> None:
    grey, alpha = RGB[..., 0], RGB[..., 1]
    image = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)])
    assert np.array_equal(decode(written(image)), on_white(np.dstack([grey] * 3), alpha))


@pytest.mark.parametrize("mode", ["1", "L"])
def test_grey_without_alpha(mode: str) -> None:
    grey = Image.fromarray(RGB[..., 0]).convert(mode)
    expected = np.asarray(grey.convert("L"))
    assert np.array_equal(decode(written(grey)), np.dstack([expected] * 3))


def test_a_palette_with_a_transparent_colour() -> None:
    indices = np.arange(35, dtype=np.uint8).reshape(5, 7) % 4
    image = Image.fromarray(indices)
    image = image.convert("P")
    image.putdata(indices.flatten().tolist())
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    colours = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90], [100, 110, 120]], dtype=np.uint8)
    assert np.array_equal(decode(written(image)), colours[indices])
    colours[2] = 255
    assert np.array_equal(decode(written(image, transparency=2)), colours[indices])
    assert np.array_equal(decode(written(image, "GIF", transparency=2)), colours[indices])


def test_a_transparent_colour_of_grey_and_of_rgb() -> None:
    grey = np.full((2, 3), 9, np.uint8)
    grey[1, 1] = 5
    assert decode(written(Image.fromarray(grey), transparency=5))[1, 1].tolist() == [255] * 3
    rgb = np.full((2, 3, 3), 9, np.uint8)
    rgb[0, 2] = 1, 2, 3
    found = decode(written(Image.fromarray(rgb), transparency=(1, 2, 3)))
    assert found[0, 2].tolist() == [255] * 3 and found[1, 1].tolist() == [9] * 3


def test_the_high_byte_of_sixteen_bits() -> None:
    values = np.array([[0, 255, 256, 0x1234, 0xFFFF]], dtype=np.uint16)
    assert decode(written(Image.fromarray(values)))[0, :, 0].tolist() == [0, 0, 1, 0x12, 0xFF]
    assert decode(written(Image.fromarray(values), transparency=0x1234))[0, :, 0].tolist() == [0, 0, 1, 255, 0xFF]


def test_four_inks_become_rgb() -> None:
    inks = Image.new("CMYK", (32, 32), (0, 128, 255, 0))
    assert np.abs(decode(written(inks, "JPEG", quality=100)).astype(int) - [255, 127, 0]).max() <= 4


TURNED = {1: RGB, 2: RGB[:, ::-1], 3: RGB[::-1, ::-1], 4: RGB[::-1], 5: RGB.transpose(1, 0, 2),
          6: np.rot90(RGB, -1), 7: RGB[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(RGB)}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_the_orientation_of_a_file_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(decode(written(Image.fromarray(RGB), kind, exif=exif, **options)), TURNED[orientation])


@pytest.mark.parametrize("orientation", TURNED)
def test_the_orientation_of_a_photograph_is_applied(orientation: int) -> None:
    flat = Image.fromarray(np.repeat(np.repeat(RGB, 16, 0), 16, 1))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data, plain = (written(flat, "JPEG", quality=95, subsampling=0, exif=e) for e in (exif, Image.Exif()))
    blocks = decode(data)[8::16, 8::16].astype(int)
    assert np.abs(blocks - TURNED[orientation].astype(int)).max() <= 16
    assert np.array_equal(np.sort(decode(data), axis=None), np.sort(decode(plain), axis=None))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0II*\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"nonsense",
                                  b"Exif\0\0" + b"\xff" * 99])
def test_damaged_exif_turns_nothing(exif: bytes) -> None:
    assert np.array_equal(decode(written(Image.fromarray(RGB), exif=exif)), RGB)


def test_an_orientation_that_is_none_turns_nothing() -> None:
    for value in (0, 9, 65535):
        exif = Image.Exif()
        exif[0x0112] = value
        assert np.array_equal(decode(written(Image.fromarray(RGB), exif=exif)), RGB)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (6, 4), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    found = decode(written(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert found.shape == (4, 6, 3) and np.abs(found.astype(int) - [250, 0, 0]).max() <= 8


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA", "EPS", "PCX"])
def test_other_formats_are_not_read(kind: str) -> None:
    with pytest.raises(ValueError, match="PNG, JPEG, WEBP, GIF, BMP"):
        decode(written(Image.fromarray(RGB), kind))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_file_that_is_cut_off_is_refused(kind: str) -> None:
    data = written(Image.fromarray(picture(60, 60)), kind)
    for end in (0, 1, 20, len(data) // 2, len(data) - 40):
        with pytest.raises(ValueError, match="cannot be read"):
            decode(data[:end])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("data", [png_of_zeros(100_000, 100_000), png_of_zeros(30_000, 5000),
                                  webp_with_canvas(1 << 14, 1 << 14)])
def test_the_size_is_checked_before_pixels_are_decoded(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels are decoded"))
    with pytest.raises(ImageRefused, match="more than 67108864 pixels"):
        decode(data)
    with pytest.raises(ImageRefused, match="more than 67108864 pixels"):
        image_size(data)


def test_the_canvas_of_a_webp_file_is_checked_before_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("the file is opened"))
    with pytest.raises(ImageRefused, match="more than 67108864 pixels"):
        image_size(webp_with_canvas(1 << 14, 1 << 14))


def test_limits_of_pixels_and_bytes() -> None:
    limits = ImageLimits(max_pixels=35, max_bytes=1000)
    assert len(to_rgb([png(), png()], limits)) == 2
    limits.check_total(70)
    with pytest.raises(ValueError, match="71 pixels together, more than 70"):
        limits.check_total(71)
    with pytest.raises(ValueError, match="6 x 6 has more than 35 pixels"):
        decode(png(6, 6), limits)
    with pytest.raises(ValueError, match="more than 1000 [(]image_max_bytes"):
        decode(png(40, 40), limits)
    for value in (RGB, Image.fromarray(RGB)):  # which are in memory already
        assert to_rgb(value, ImageLimits(max_pixels=34))


def test_run_length_encoding_of_bmp_is_refused() -> None:
    header = b"BM" + (0).to_bytes(8, "little") + (1078).to_bytes(4, "little")
    header += (40).to_bytes(4, "little") + (8).to_bytes(4, "little") * 2 + b"\1\0\x08\0" + (1).to_bytes(4, "little")
    with pytest.raises(ImageRefused, match="run-length"):
        decode(header + bytes(20) + bytes(1024) + b"\0\1")


def test_scans_of_a_jpeg_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen bytes are one more scan, which takes 40 ms for 67 million pixels: a file would be read for hours."""
    data = written(Image.new("L", (64, 64), 100), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    hidden = b"\xff\xe1\x00\x10" + b"\xff\xda" * 7  # in a segment of EXIF
    fine = data[:2] + hidden * 50 + data[2:-2] + scan * 30 + b"\xff\xd9" + b"\xff\xda" * 100
    assert decode(fine).shape == (64, 64, 3)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels are decoded"))
    for between in (b"", b"\xff\x01", b"\xff\xd0", b"\xff\xff", b"\xff\xfe\x00\x04ab"):
        many = data[:2] + data[2:-2] + (between + scan) * 100 + b"\xff\xd9"
        for read in (decode, image_size):
            with pytest.raises(ImageRefused, match="64 scans"):
                read(many)


def test_what_callers_of_the_engine_give() -> None:
    grey, alpha = RGB[..., 0], picture(5, 7, seed=2)[..., 0]
    forms: list[Any] = [RGB, Image.fromarray(RGB), png(), bytearray(png()), memoryview(png()), RGB.copy(order="F")]
    for form in forms:
        (found,) = to_rgb(form)
        assert np.array_equal(found, RGB) and found.flags.c_contiguous
    assert len(to_rgb(forms)) == len(forms) and len(to_rgb(tuple(forms))) == len(forms)
    assert np.array_equal(to_rgb(grey)[0], np.dstack([grey] * 3))
    assert np.array_equal(to_rgb(np.dstack([RGB, alpha]))[0], on_white(RGB, alpha))
    for wrong in (RGB.astype(np.float32), RGB[None], RGB[..., :2], "x", None, 7, np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(ValueError, match="image"):
            to_rgb(wrong)


def check_hostile(number: int) -> None:
    try:
        found = decode(hostile(number))
    except ValueError as error:
        assert "image" in str(error) or "BMP" in str(error)
    else:
        assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3


@pytest.mark.filterwarnings("ignore")
def test_hostile_files_raise_one_kind_of_error() -> None:
    for number in range(100):
        check_hostile(number)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_thousands_of_hostile_files_raise_one_kind_of_error_and_leave_no_memory() -> None:
    for number in range(300):
        check_hostile(number)
    before = resident_bytes()
    for number in range(300, 2300):
        check_hostile(number)
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

