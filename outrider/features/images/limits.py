"""ImageLimits: how large the images of one request may be. Does not import PIL, so that settings may import it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PIXELS = 1 << 26  # of one image: 8192 x 8192
IMAGES_OF_FULL_SIZE = 2  # that one request may have
MAX_BYTES = 20 << 20  # of an image's file
DETAILS = ("auto", "low", "high")  # how finely a model should look at an image


class ImageRefused(ValueError):
    """Raised for an image that exceeds a limit. The message names the limit and says what to do."""


@dataclass(frozen=True)
class ImageLimits:
    max_pixels: int = MAX_PIXELS
    max_bytes: int = MAX_BYTES

    @property
    def max_request_pixels(self) -> int:
        """The most pixels that all images of one request may have together."""
        return IMAGES_OF_FULL_SIZE * self.max_pixels

    @property
    def max_request_bytes(self) -> int:
        """The most bytes that the files of all images of one request may have together."""
        return IMAGES_OF_FULL_SIZE * self.max_bytes

    def check_size(self, width: int, height: int) -> None:
        """Raise ImageRefused for an image that is empty or has too many pixels."""
        if width < 1 or height < 1:
            raise ImageRefused("an image has no pixels: send another one")
        if width * height > self.max_pixels:
            raise self.too_large(f"an image of {width} x {height}")

    def too_large(self, what: str) -> ImageRefused:
        return ImageRefused(f"{what} has more than {self.max_pixels} pixels (image_max_pixels): make it smaller")

    def check_total(self, num_pixels: int) -> None:
        if num_pixels > self.max_request_pixels:
            raise ImageRefused(f"the images of this request have {num_pixels} pixels together, more than "
                             f"{self.max_request_pixels} (twice image_max_pixels): send fewer or smaller ones")

    def check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise ImageRefused(f"an image has {num_bytes} bytes, more than {self.max_bytes} (image_max_bytes): "
                             "compress it, or make it smaller")


DEFAULT_LIMITS = ImageLimits()
