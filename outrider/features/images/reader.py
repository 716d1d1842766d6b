"""ImagesReader: reads the images that a prompt gives, prepares them for the tower, and finds their places among the
prompt's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from outrider.core.fields import did_you_mean, shown
from outrider.core.hidden_params import RequestParams
from outrider.engine.input_reader import InputReader
from outrider.engine.served_model import ServedModel
from outrider.features.images.model_limits import SeeingLimits, parsed
from outrider.features.images.part import ImageInputs, PlacedImage, TwoWayImages
from outrider.features.images.preprocess.processor import ImageProcessor, Pixels, PreparedImage

MODALITY = "image"


class ImagesReader(InputReader):
    def __init__(self, prompt: Mapping[str, Any], params: RequestParams, model: ServedModel) -> None:
        self._images: list[PreparedImage] = []
        self._model = model
        data = prompt.get("multi_modal_data") or {}
        if data.get(MODALITY) is not None:
            check_served(model, 0)  # before its value is read
        given = images_of(data)
        if not given:
            return
        self._limits = check_served(model, len(given))
        self._kind = self._limits.part_type
        self._processor, details = make_processor(self._limits, prompt.get("mm_processor_kwargs"), len(given))
        self._images = [self._prepare(image, detail) for image, detail in zip(given, details, strict=True)]

    def token_ids(self, own: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return the prompt's token ids with the tokens of each image. The prompt has either one placeholder for each
        image or all tokens of the images."""
        if not self._images:
            return own()
        runs = [self._processor.placeholder_ids(image.grid) for image in self._images]
        return expanded(list(own()), self._processor.placeholder, runs)

    def make_parts(self, token_ids: Sequence[int]) -> list[ImageInputs]:
        if not self._images:
            return []
        placed, place = [], 0
        for image in self._images:
            offset = token_ids.index(self._processor.placeholder, place)
            placed.append(PlacedImage(offset, image.grid, image.digest, image.patches))
            place = placed[-1].end
        return [self._kind(tuple(placed))]

    def _prepare(self, image: Pixels, detail: str | None) -> PreparedImage:
        tokens = self._processor.size_of(image.shape[0], image.shape[1], detail=detail).num_tokens
        if tokens > self._model.limits.max_len:
            raise ValueError(f"an image makes {tokens} tokens, and max_model_len is {self._model.limits.max_len}: make "
                             "it smaller, or raise max_model_len")
        if tokens > self._limits.longest:
            raise ValueError(f"an image makes {tokens} tokens, and this engine has planned memory for "
                             f"{self._limits.longest}: make it smaller, ask for less detail, or raise the size in "
                             "limit_mm_per_prompt")
        if issubclass(self._kind, TwoWayImages) and tokens > self._model.longest_range:
            raise ValueError(f"an image makes {tokens} tokens, which one step must compute together, and a step has "
                             f"room for {max(0, self._model.longest_range)}: raise max_num_batched_tokens, lower "
                             "max_num_seqs, or ask for less detail")
        return self._processor.prepare(image, detail=detail)


def images_of(data: Mapping[str, Any] | None) -> list[Pixels]:
    """Return the RGB pixels of the images in `multi_modal_data`, which is one image or a list."""
    for name, given in (data or {}).items():
        if name != MODALITY and given is not None and not (isinstance(given, (list, tuple)) and not given):
            hint = did_you_mean(str(name), [MODALITY]) or ":"
            raise ValueError(f"multi_modal_data: {shown(name)} is not served{hint} give images alone, as "
                             "{'image': [...]}")
    given = (data or {}).get(MODALITY)
    if given is None:
        return []
    if isinstance(given, (list, tuple)) and any(image is None for image in given):
        raise ValueError("multi_modal_data: an image is None: give the pixels with every request, even if the same "
                         "image was sent before")
    try:
        from outrider.features.images.decode import to_rgb
    except ModuleNotFoundError:
        raise ValueError("images need Pillow: pip install 'outrider[images]'") from None
    return to_rgb(given)


def check_served(model: ServedModel, count: int) -> SeeingLimits:
    """Return the model's image limits. Raises ValueError if the model takes no images, or fewer than `count`."""
    limits = model.limits.part(SeeingLimits)
    if limits is None:
        raise ValueError(f"{model.name} is served without images: use a model that sees images (docs/models.md), "
                         "started without limit_mm_per_prompt={'image': 0}")
    if count > limits.most:
        raise ValueError(f"At most {limits.most} image(s) may be provided in one prompt, got {count}: give fewer, or "
                         f"start the engine with limit_mm_per_prompt={{'image': {count}}}")
    if issubclass(limits.part_type, TwoWayImages) and not model.takes_extra_keys:
        raise ValueError("images of this model are not served with exact=True on this device, because their tokens see "
                         "each other in both directions, which only the CPU's attention computes exactly: leave exact "
                         "out")
    return limits


def make_processor(limits: SeeingLimits, given: Mapping[str, Any] | None,
                   count: int) -> tuple[ImageProcessor, list[str | None]]:
    """Return the processor of images with a prompt's own settings, and the detail of each image."""
    options = dict(given or {})
    details = options.pop("detail", None)
    if not isinstance(details, (list, tuple)):
        details = [details] * count
    if len(details) != count:
        raise ValueError(f"mm_processor_kwargs: detail has {len(details)} values, and the prompt has {count} image(s): "
                         "give one for each, or one for all")
    processor = _processor(limits, "{}")
    for name in options:
        if name not in processor.options:
            hint = did_you_mean(str(name), processor.options) or ":"
            raise ValueError(f"mm_processor_kwargs: {shown(name)} is not an option of this model's images{hint} give "
                             f"some of {', '.join(('detail', *processor.options))}")
    return _processor(limits, json.dumps(options, sort_keys=True, default=shown)), list(details)


@lru_cache(64)
def _processor(limits: SeeingLimits, options: str) -> ImageProcessor:
    """Make the processor with a prompt's own options. options: as JSON text."""
    settings, replaced = parsed(limits.processor_config), json.loads(options)
    if replaced:
        settings = with_options(settings or {}, replaced)
    return ImageProcessor.from_config(parsed(limits.model_config), settings)


def with_options(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a processor's file with `options` in place of those of the same name."""
    inner = settings.get("image_processor")
    return settings | options if inner is None else settings | {"image_processor": inner | options}


def expanded(token_ids: list[int], placeholder: int, runs: Sequence[Sequence[int]]) -> list[int]:
    """Insert the tokens of each image into a prompt. Either every image has one placeholder in the prompt, or all
    images have all their tokens already."""
    count, num_tokens = token_ids.count(placeholder), sum(list(run).count(placeholder) for run in runs)
    if count == num_tokens and _are_in_order(token_ids, placeholder, runs):
        return token_ids
    if count != len(runs):
        raise ValueError(f"the prompt has {count} placeholder token(s) for images (id {placeholder}), and {len(runs)} "
                         f"image(s) with {num_tokens} tokens were given: write one placeholder where each image stands")
    left = iter(runs)
    return [token for own in token_ids for token in (next(left) if own == placeholder else (own,))]


def _are_in_order(token_ids: list[int], placeholder: int, runs: Sequence[Sequence[int]]) -> bool:
    """Whether the prompt contains the tokens of all images already, in the order of the images."""
    place = 0
    for run in runs:
        before = list(run).index(placeholder)
        try:
            start = token_ids.index(placeholder, place) - before
        except ValueError:
            return False
        if start < place or token_ids[start : start + len(run)] != list(run):
            return False
        place = start + len(run)
    return placeholder not in token_ids[place:]
