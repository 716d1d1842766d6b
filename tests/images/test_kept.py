"""Each image is encoded once, however many prompts with images are computed in turns; and what encoding takes is
known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from outrider.config import EngineConfig
from outrider.features.images import kept
from outrider.features.images.encoder import ImageEncoder
from outrider.features.images.encoder_on_device import ImagesOnDevice
from outrider.features.images.kept import KeptFeatures
from outrider.features.images.model_limits import SeeingLimits
from outrider.features.images.working_memory import LiveBytes, encoding_bytes, tower_room
from outrider.layers.given_rows import PlacedVectors
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.models.vision.base import ImageFeatures
from outrider.models.vision.grid import ImageGrid
from outrider.models.vision.towers import build_tower
from tests.drafters.hybrid_rig import mtp_of
from tests.engine.harness import greedy
from tests.images.recipes import RECIPES, allow_small_budget
from tests.images.rig import ImageRig, Scene, folder_of, model_of, tower_of
from tests.images.test_matrix import answers_of

CAUSAL = ("gemma4_edge", "qwen3_5", "qwen3_vl")


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_small_budget(monkeypatch)
    yield


def pictures(family: str) -> list[Scene]:
    """Four prompts with other images, all of which chunks cut several times."""
    shape, params = RECIPES[family].shapes[2], greedy(6, logprobs=0, ignore_eos=True)
    return [Scene(((seed, 2), (seed + 10, 5)), ((seed, shape),), params) for seed in range(4)]


@pytest.mark.parametrize(("family", "drafts"), [*((family, False) for family in CAUSAL), ("qwen3_5", True)])
def test_images_that_share_a_step_are_encoded_once(family: str, drafts: bool) -> None:
    """A drafter reads features one place ahead, after those of all requests were read."""
    settings: dict[str, Any] = {"enable_prefix_caching": False}
    drafters = [mtp_of(model_of(family), 2) if drafts else None for _ in range(2)]
    with ImageRig(family, drafter=drafters[0], max_num_seqs=1, **settings) as rig:
        expected = [answers_of(rig.run_scenes([scene]))[0] for scene in pictures(family)]
    with ImageRig(family, drafter=drafters[1], max_num_seqs=4, max_num_batched_tokens=8, **settings) as rig:
        rig.encoder._kept = KeptFeatures(8)
        assert answers_of(rig.run_scenes(pictures(family))) == expected
        assert any(sum(known > 1 for known in batch.num_known) > 1 for batch in rig.batches)
        assert rig.encoder.num_encoded == 4


def test_images_computed_in_turns_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = RECIPES["qwen3_vl"].shapes[2]
    with ImageRig("qwen3_vl") as rig:
        parts = [rig.engine.checks.check(scene.prompt("qwen3_vl"), scene.params).input_parts[0]
                 for scene in pictures("qwen3_vl")[:3]]
    whole = [encoder_with(100).encode(part, 0, 20) for part in parts]
    assert all(len(own.values) == shape[0] * shape[1] for own in whole)
    for host_bytes, count in ((kept.HOST_BYTES, 3), (0, 12)):
        monkeypatch.setattr(kept, "HOST_BYTES", host_bytes)
        encoder = encoder_with(16)
        found: list[list[PlacedVectors]] = [[] for _ in parts]
        for start in range(3, 15, 3):
            encoder.expect([(part, start) for part in parts])
            for part, own in zip(parts, found, strict=True):
                own.append(encoder.encode(part, start, start + 3))
                encoder.encode(part, start + 1, start + 4)
        encoder.expect([])
        assert encoder.num_encoded == count and not encoder._kept._far
        for own, right in zip(found, whole, strict=True):
            assert torch.equal(torch.cat([part.values for part in own]), right.values)
            assert torch.equal(torch.cat([part.added[1] for part in own]), right.added[1])


def encoder_with(room: int) -> ImageEncoder:
    return ImageEncoder(lambda: tower_of("qwen3_vl"), torch.device("cpu"), room)


def features(count: int) -> ImageFeatures:
    return ImageFeatures(torch.full((count, 2), float(count)), (torch.zeros(count, 2),))


def test_features_that_are_awaited_go_to_the_host_and_others_are_dropped() -> None:
    store = KeptFeatures(10)
    for name, count in ((b"a", 6), (b"b", 4), (b"c", 3)):
        store.expect({b"b", b"c"})
        store.add(name, count, lambda count=count: features(count))  # type: ignore[misc]
    assert store.get(b"a") is None and list(store._near) == [b"b", b"c"] and not store._far
    store.add(b"d", 20, lambda: features(20))
    assert list(store._near) == [b"d"] and list(store._far) == [b"b", b"c"]
    assert torch.equal(store.get(b"b").features, features(4).features)  # type: ignore[union-attr]
    store.expect({b"c", b"d"})
    assert store.get(b"b") is None and store.get(b"c") is not None
    store.clear()
    assert store.get(b"c") is None and store.get(b"d") is None


TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"hidden_size": 96, "intermediate_size": 300, "num_heads": 4, "depth": 5,
                 "deepstack_visual_indexes": [1, 2]},
    "qwen3_5": {"hidden_size": 96, "intermediate_size": 300, "num_heads": 4, "depth": 3},
    "gemma4": {"hidden_size": 96, "intermediate_size": 300, "num_attention_heads": 4, "num_key_value_heads": 4,
               "head_dim": 24, "num_hidden_layers": 3, "use_clipped_linears": True},
    "gemma4_unified": {"mm_embed_dim": 96, "output_proj_dims": 96},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TOWERS)
def test_the_outline_takes_what_a_tower_takes(kind: str, dtype: torch.dtype) -> None:
    config = {"model_type": kind, "text_config": {"hidden_size": 64}, "vision_config": TOWERS[kind]}
    tower = build_tower(config, dtype=dtype, device="cpu")
    for slot in tower.weights().values():
        slot.target.normal_()
    tower.finalize()
    rows, cols = 8, 9
    patches = np.zeros((rows * cols * tower.patches_per_token, tower.patch_bytes), dtype=np.uint8)
    with torch.inference_mode(), LiveBytes() as live:
        made = tower.encode(torch.from_numpy(patches), ImageGrid(rows * cols, rows, cols, rows, cols))
    planned = encoding_bytes(build_tower(config, dtype=dtype, device="meta"), rows * cols)
    assert live.peak > 10 * made.num_bytes / 4 and live.peak <= planned <= live.peak + 2 * patches.nbytes
    room = tower_room(json.dumps(config), dtype, "config.json", rows * cols)
    assert room.encoding_bytes == planned and room.weight_bytes == tower.weight_bytes
    assert room.token_bytes * rows * cols == made.num_bytes


def test_memory_is_planned_for_the_longest_image() -> None:
    outline: Any = build_model(resolve(str(folder_of("qwen3_vl"))).config, dtype=torch.float64, device="meta")
    found = {}
    for name, limit in (("any", None), ("small", {"image": {"count": 2, "width": 16, "height": 24}})):
        with ImageRig("qwen3_vl", limit_mm_per_prompt=limit) as rig:
            limits = rig.engine.checks.model.limits
            own = limits.part(SeeingLimits)
            assert own is not None
            found[name] = (own.longest, ImagesOnDevice(EngineConfig("tiny")).num_bytes(limits, outline).later)
            if name == "small":
                assert own.most == 2
                rig.run_scenes([Scene(((1, 3), (2, 2)), ((1, (3, 2)),), greedy(2))])
                with pytest.raises(ValueError, match="makes 12 tokens, and this engine has planned memory for 6"):
                    rig.run_scenes([Scene(((1, 3), (2, 2)), ((1, (3, 4)),), greedy(2))])
    assert found["any"][0] > found["small"][0] == 6 and found["any"][1] > found["small"][1]
    row = 4 * 64 * 8  # deepstack adds two vectors for each token, here in float64
    assert found["small"][1] > 8192 * row * 3 // 4 + tower_of("qwen3_vl").weight_bytes


@pytest.mark.parametrize("size", [{"width": 5}, {"width": 0, "height": 3}, {"width": "5", "height": 5}])
def test_sizes_that_are_none_are_refused(size: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="width and height must be two numbers of pixels"):
        EngineConfig("tiny", limit_mm_per_prompt={"image": {"count": 1} | size})
