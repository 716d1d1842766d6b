"""Preprocessing of images against the PIL image processors of transformers: patches and grids equal bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("PIL", reason="images need Pillow")

import PIL.Image

from outrider.features.images.preprocess.processor import ImageProcessor
from outrider.models.vision.levels import RESCALE, centered_levels, unit_levels

HALF = [0.5, 0.5, 0.5]
GEMMA = {"model_type": "gemma4", "vision_config": {"patch_size": 16}}
UNIFIED = {"model_type": "gemma4_unified", "vision_config": {"patch_size": 16}}
QWEN = {"model_type": "qwen3_5", "vision_config": {"patch_size": 16}}
MOST = 400_000  # pixels
EXTREMES = [(1, 1), (16, 4000), (4000, 16), (1, 200), (3, 3), (3, 500), (1080, 1920), (47, 48), (2, 400), (272, 400),
            (768, 768)]  # 272 and 400 lie halfway between multiples of 32
STUBS = [f"torchvision{part}" for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def images(count: int) -> Iterator[np.ndarray]:
    """Noise of random sizes, most of them small, some long."""
    draw = np.random.default_rng(57)
    sizes = EXTREMES + [tuple(np.exp(draw.uniform(0, 6.4, 2)).astype(int) + 1) for _ in range(count - len(EXTREMES))]
    for height, width in sizes:
        yield draw.integers(0, 256, (height, width, 3), dtype=np.uint8)


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 7919 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def processor(model: dict[str, Any], **settings: Any) -> ImageProcessor:
    return ImageProcessor.from_config(model, settings or None)


def qwen_theirs(rgb: np.ndarray, least: int, most: int) -> dict[str, Any]:
    pytest.importorskip("transformers")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made = Qwen2VLImageProcessorPil(size={"shortest_edge": least, "longest_edge": most}, patch_size=16,
                                    image_mean=HALF, image_std=HALF)
    return made(PIL.Image.fromarray(rgb), return_tensors="np")


def gemma_theirs(rgb: np.ndarray, budget: int) -> dict[str, Any]:
    pytest.importorskip("transformers")
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(max_soft_tokens=budget)(PIL.Image.fromarray(rgb), return_tensors="np")


def check_qwen(rgb: np.ndarray, detail: str, least: int, most: int) -> None:
    ours = processor(QWEN, size={"shortest_edge": 65536, "longest_edge": MOST})
    if max(rgb.shape[:2]) > 200 * min(rgb.shape[:2]):
        with pytest.raises(ValueError, match="200 times"):
            ours.prepare(rgb, detail=detail)
        with pytest.raises(ValueError, match="must be smaller than 200"):
            qwen_theirs(rgb, least, most)
        return
    made, theirs = ours.prepare(rgb, detail=detail), qwen_theirs(rgb, least, most)
    patches = centered_levels()[made.patches].reshape(-1, 3, 1, 16, 16).repeat(2, axis=2)  # the frame twice
    assert np.array_equal(patches.reshape(len(patches), -1), theirs["pixel_values"])
    assert [[1, 2 * made.grid.rows, 2 * made.grid.cols]] == theirs["image_grid_thw"].tolist()
    assert made.grid == ours.size_of(*rgb.shape[:2], detail=detail)
    assert made.grid.num_tokens * 4 == len(made.patches) and made.grid.num_tokens <= ours.most_tokens()


def check_gemma(rgb: np.ndarray, detail: str, budget: int) -> None:
    ours = processor(GEMMA, max_soft_tokens=140)
    made, theirs = ours.prepare(rgb, detail=detail), gemma_theirs(rgb, budget)
    count = len(made.patches)
    assert np.array_equal(unit_levels()[made.patches], theirs["pixel_values"][0, :count])
    columns, rows = np.meshgrid(np.arange(3 * made.grid.cols), np.arange(3 * made.grid.rows))
    positions = theirs["image_position_ids"][0]
    assert np.array_equal(np.stack([columns.ravel(), rows.ravel()], axis=1), positions[:count])
    assert (positions[count:] == -1).all()
    assert [made.grid.num_tokens] == list(theirs["num_soft_tokens_per_image"])
    assert made.grid == ours.size_of(*rgb.shape[:2], detail=detail)
    assert made.grid.num_tokens <= budget <= ours.most_tokens()


def merged_theirs(theirs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The tiles that transformers' unified class makes of patches. Its module imports torchvision, whose place a stub
    takes: the function called here does not use it."""
    import torch

    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in STUBS}):
        from transformers.models.gemma4_unified.image_processing_gemma4_unified import patches_merge
    count = theirs["num_soft_tokens_per_image"][0]
    patches, positions = (torch.from_numpy(np.asarray(theirs[key]))[:, : 9 * count]
                          for key in ("pixel_values", "image_position_ids"))
    tiles, places = patches_merge(patches, positions, count)
    return tiles[0].numpy(), places[0].numpy()


def check_unified(rgb: np.ndarray, detail: str, budget: int) -> None:
    made = processor(UNIFIED).prepare(rgb, detail=detail)
    tiles, places = merged_theirs(gemma_theirs(rgb, budget))
    assert np.array_equal(unit_levels()[made.patches], tiles)
    columns, rows = np.meshgrid(np.arange(made.grid.cols), np.arange(made.grid.rows))
    assert np.array_equal(np.stack([columns.ravel(), rows.ravel()], axis=1), places)


def check_images(count: int) -> None:
    areas = {"low": (65536, 262144), "auto": (65536, MOST), "high": (MOST, MOST)}
    for index, rgb in enumerate(images(count)):
        detail = "high" if index % 20 == 12 else ("low", "auto")[index % 2]
        check_qwen(rgb, detail, *areas[detail])
        check_gemma(rgb, detail, {"low": 70, "auto": 140, "high": 1120}[detail])
        check_unified(rgb, detail, {"low": 70, "auto": 280, "high": 1120}[detail])


def test_patches_and_grids_equal_those_of_transformers() -> None:
    check_images(60)


@pytest.mark.long
def test_patches_and_grids_of_many_sizes_equal_those_of_transformers() -> None:
    check_images(300)


@pytest.mark.parametrize(("size", "tokens"), [
    ((480, 640), (63, 130, 266, 540, 1064)), ((1080, 1920), (66, 120, 264, 527, 1100)),
    ((224, 224), (64, 121, 256, 529, 1089)),
])
def test_gemma_fills_its_budgets(size: tuple[int, int], tokens: tuple[int, ...]) -> None:
    made = [processor(GEMMA, max_soft_tokens=budget) for budget in (70, 140, 280, 560, 1120)]
    assert tuple(one.size_of(*size).num_tokens for one in made) == tokens


@pytest.mark.parametrize(("size", "tokens"), [((480, 640), 300), ((1080, 1920), 2040), ((224, 224), 64),
                                              ((4000, 3000), 11750), ((9000, 9000), 16384)])
def test_qwen_keeps_sizes_within_its_limits(size: tuple[int, int], tokens: int) -> None:
    assert processor(QWEN).size_of(*size).num_tokens == tokens


@pytest.mark.parametrize("model", [QWEN, GEMMA, UNIFIED])
@pytest.mark.parametrize("limits", [(1, 1), (1, 30_000), (65_536, 1 << 24), (1 << 24, 1 << 24)])
def test_no_size_makes_more_tokens_than_said(model: dict[str, Any], limits: tuple[int, int]) -> None:
    made = processor(model, size={"shortest_edge": limits[0], "longest_edge": limits[1]} if model is QWEN else {})
    sizes = [int(1.7**i) for i in range(18)]
    for height in sizes:
        for width in (w for w in sizes if max(w, height) <= 200 * min(w, height)):
            for detail in ("low", "auto", "high"):
                grid = made.size_of(height, width, detail=detail)
                assert 1 <= grid.num_tokens <= made.most_tokens() and grid.num_tokens == grid.rows * grid.cols


def test_placeholders_are_what_one_image_becomes() -> None:
    gemma = processor({**GEMMA, "boi_token_id": 301, "eoi_token_id": 302, "image_token_id": 300})
    grid = gemma.size_of(224, 224, detail="low")
    assert gemma.placeholder == 300 and gemma.placeholder_ids(grid) == [301, *[300] * 64, 302]
    assert processor(GEMMA).placeholder_ids(grid) == [255999, *[258880] * 64, 258882]
    for kind, pad in (("qwen3_5", 248056), ("qwen3_5_moe", 248056), ("qwen3_vl", 151655), ("qwen3_vl_moe", 151655)):
        made = processor({**QWEN, "model_type": kind})
        assert made.placeholder == pad and made.placeholder_ids(made.size_of(64, 64)) == [pad] * 64


def test_the_digest_covers_pixels_shape_and_settings() -> None:
    rgb = picture(60, 80)
    other = rgb.copy()
    other[59, 79, 2] ^= 1
    small = {"size": {"shortest_edge": 65536, "longest_edge": 70000}}
    made = [
        processor(GEMMA).prepare(rgb), processor(UNIFIED).prepare(rgb), processor(GEMMA).prepare(other),
        processor(GEMMA).prepare(rgb.reshape(80, 60, 3)), processor(GEMMA, max_soft_tokens=560).prepare(rgb),
        processor(GEMMA).prepare(rgb, detail="low"), processor(QWEN).prepare(rgb),
        processor(QWEN, **small).prepare(rgb), processor(QWEN).prepare(rgb, detail="high"),
        processor(QWEN).prepare(rgb, detail="low"),
    ]
    assert len({one.digest for one in made}) == len(made) and {len(one.digest) for one in made} == {32}
    assert processor(GEMMA).prepare(rgb.copy(), detail="auto").digest == made[0].digest
    assert processor(GEMMA).prepare(np.asfortranarray(rgb)).digest == made[0].digest


def test_settings_may_be_flat_or_nested() -> None:
    flat = {"size": {"shortest_edge": 65536, "longest_edge": 131072}, "patch_size": 16, "image_mean": HALF,
            "image_processor_type": "Qwen2VLImageProcessorFast", "rescale_factor": RESCALE, "resample": 3}
    older = {"min_pixels": 65536, "max_pixels": 131072}
    grids = [ImageProcessor.from_config(QWEN, given).size_of(4000, 3000)
             for given in (flat, {"image_processor": flat, "processor_class": "Qwen3VLProcessor"}, older)]
    assert len(set(grids)) == 1 and grids[0].num_tokens <= 128


@pytest.mark.parametrize(("model", "settings", "said"), [
    ({"model_type": "llava"}, {}, "model_type='llava'"),
    ({"model_type": "qwen3_vl"}, {}, "vision_config"),
    (GEMMA, {"max_soft_tokens": 300}, "preprocessor_config.json: max_soft_tokens=300"),
    (GEMMA, {"image_processor": {"patch_size": 14}}, "processor_config.json: image_processor: patch_size=14"),
    (GEMMA, {"pooling_kernel_size": 2}, "pooling_kernel_size=2"),
    (GEMMA, {"do_normalize": True, "image_mean": HALF}, "image_mean"),
    (GEMMA, {"resample": 2}, "resample=2"),
    (QWEN, {"do_resize": False}, "do_resize=False"),
    (QWEN, {"rescale_factor": 1}, "rescale_factor=1"),
    (QWEN, {"image_std": [0.2, 0.5, 0.5]}, "image_std"),
    (QWEN, {"merge_size": 4}, "merge_size=4"),
    (QWEN, {"size": {"height": 224}}, "height=224"),
    (QWEN, {"min_pixels": 100, "max_pixels": 99}, "min_pixels=100"),
    (QWEN, {"max_pixels": "many"}, "max_pixels"),
])
def test_what_is_not_served_is_named(model: dict[str, Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        ImageProcessor.from_config(model, settings)


def test_images_that_no_model_takes_are_refused() -> None:
    gemma, qwen = processor(GEMMA), processor(QWEN)
    for made in (gemma, qwen):
        with pytest.raises(ValueError, match="at least one pixel"):
            made.size_of(0, 5)
        with pytest.raises(ValueError, match="detail must be one of"):
            made.size_of(5, 5, detail="original")
        with pytest.raises(ValueError, match="uint8 of shape"):
            made.prepare(picture(8, 8).astype(np.float32))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="uint8 of shape"):
            made.prepare(picture(8, 8)[:, :, :2])
    with pytest.raises(ValueError, match="201 times"):
        qwen.size_of(1, 201)
    few = {"patch_size": 16, "position_embedding_size": 30}
    with pytest.raises(ValueError, match="positions for 10"):
        processor({"model_type": "gemma4", "vision_config": few}).size_of(16, 4000, detail="low")


def test_torch_is_not_loaded_and_pillow_only_when_an_image_is_resized() -> None:
    program = (
        "import sys; from outrider.features.images.preprocess.processor import ImageProcessor; import numpy; "
        f"made = ImageProcessor.from_config({QWEN!r}, None); made.size_of(9, 9); assert 'PIL' not in sys.modules; "
        "made.prepare(numpy.zeros((9, 9, 3), 'uint8')); assert 'PIL' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
