"""What the images of a prompt say to the cache, the scheduler and the ropes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.input_part import InputParts
from outrider.features.images.part import GridImages, ImageInputs, PlacedImage, TwoWayImages
from outrider.features.images.preprocess.processor import ImageProcessor
from outrider.models.vision.grid import ImageGrid

NOTHING = np.zeros((1, 1), dtype=np.uint8)


def image(offset: int, rows: int, cols: int, name: str = "a") -> PlacedImage:
    return PlacedImage(offset, ImageGrid(rows * cols, rows, cols, rows * 32, cols * 32), name.encode() * 32, NOTHING)


def test_a_page_tells_which_image_it_has_and_where() -> None:
    part = ImageInputs((image(10, 2, 4), image(40, 3, 3, "b")))
    assert part.page_content(0, 10, ()) == part.page_content(18, 40, ()) == part.page_content(49, 64, ()) == []
    contents = [part.page_content(start, start + 16, ()) for start in range(0, 64, 16)]
    assert [content[0] for content in contents if content] == [10, -6, 8, -8]
    assert len({tuple(content[1:]) for content in contents if content}) == 2
    assert all(-(1 << 63) <= number < 1 << 63 for content in contents for number in content)


def test_a_page_is_the_same_wherever_its_image_lies_in_the_prompt() -> None:
    near, far = ImageInputs((image(5, 2, 4),)), ImageInputs((image(37, 2, 4),))
    assert near.page_content(0, 16, ()) == far.page_content(32, 48, ()) != near.page_content(0, 7, ())[:0]
    assert near.page_content(0, 16, ()) != ImageInputs((image(6, 2, 4),)).page_content(0, 16, ())
    assert near.page_content(0, 16, ()) != ImageInputs((image(5, 2, 4, "b"),)).page_content(0, 16, ())


def test_every_setting_of_the_processor_is_in_the_digest() -> None:
    config = {"model_type": "qwen3_5", "image_token_id": 9, "vision_config": {"patch_size": 16}}
    rgb = np.zeros((256, 256, 3), dtype=np.uint8)

    def digest(detail: str | None = None, **settings: int) -> bytes:
        return ImageProcessor.from_config(config, settings).prepare(rgb, detail=detail).digest

    found = [digest(), digest("high"), digest(max_pixels=65536), digest(min_pixels=64)]
    assert len({*found}) == len(found) and {len(own) for own in found} == {32}


def test_only_images_seen_both_ways_are_whole() -> None:
    parts = {kind: InputParts((kind((image(10, 2, 4), image(18, 1, 3))),)) for kind in (ImageInputs, TwoWayImages)}
    for position in range(30):
        assert parts[ImageInputs].last_cut(position) == parts[ImageInputs].next_cut(position) == position
    assert [parts[TwoWayImages].last_cut(at) for at in (9, 10, 11, 17, 18, 19, 21, 22)] == [9, 10, 10, 10, 18, 18, 21,
                                                                                           22]
    assert [parts[TwoWayImages].next_cut(at) for at in (10, 11, 18, 20)] == [10, 18, 18, 21]
    assert [*TwoWayImages((image(10, 2, 4),)).two_way_ranges(0, 17)] == []
    assert [*TwoWayImages((image(10, 2, 4),)).two_way_ranges(10, 18)] == [(10, 18)]
    assert [*ImageInputs((image(10, 2, 4),)).encoded_ranges(12, 40)] == [(12, 18)]


def components(part: GridImages, count: int) -> np.ndarray:
    """All positions, token by token."""
    found, text, at = [], 0, 0
    starts = {own.offset: own.grid for own in part.images}
    while at < count:
        if at in starts:
            grid = starts[at]
            found += [(text, text + row, text + col) for row in range(grid.rows) for col in range(grid.cols)]
            text, at = text + max(grid.rows, grid.cols), at + grid.num_tokens
        else:
            found.append((text, text, text))
            text, at = text + 1, at + 1
    return np.array(found).T


def test_positions_of_a_known_prompt() -> None:
    part = GridImages((image(4, 2, 3), image(14, 3, 2, "b")))
    found = part.rope_positions(0, 20)
    assert found is not None and found[0].tolist() == [*range(4), *[4] * 6, 7, 8, 9, 10, *[11] * 6]
    assert found[1].tolist()[4:10] == [4, 4, 4, 5, 5, 5] and found[2].tolist()[4:10] == [4, 5, 6, 4, 5, 6]
    assert part.rope_shift == -6 and part.rope_positions(20, 30) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
       st.integers(0, 40), st.integers(1, 30))
def test_positions_of_a_chunk_are_those_of_the_whole(gaps: list[tuple[int, int, int]], start: int, length: int) -> None:
    images, at = [], 0
    for gap, rows, cols in gaps:
        images.append(image(at + gap, rows, cols))
        at = images[-1].end
    part, end = GridImages(tuple(images)), start + length
    whole = components(part, max(end, at) + 1)[:, start:end]
    found = part.rope_positions(start, end)
    if found is None:
        assert start >= at
        found = np.arange(start, end)[None].repeat(3, axis=0) + part.rope_shift
    assert found.tolist() == whole.tolist()


@pytest.mark.parametrize("kind", [ImageInputs, TwoWayImages, GridImages])
def test_a_part_is_plain_data(kind: type[ImageInputs]) -> None:
    import pickle

    part = kind((image(3, 2, 2),))
    other = pickle.loads(pickle.dumps(part))
    assert type(other) is kind and other.images[0].digest == part.images[0].digest and other.cache_key is None
