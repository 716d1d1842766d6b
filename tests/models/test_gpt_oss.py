"""gpt-oss with its experts in MXFP4, against transformers' model of the numbers that these stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.formats.scaled import ScaledExperts
from outrider.kernels import moe, reference
from outrider.layers import Experts, find_modules
from outrider.mixers.paged.backend import AttentionLayer
from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from tests.engine.harness import Ask, Rig, greedy, prompt_of
from tests.engine.harness import tokens_of as texts_of
from tests.models.oracle import all_logits, hf_config, hf_logits, load, make_folder, tokens_of
from tests.models.test_oracle import edit_config

SECTION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of codes 0 to 7; 8 to 15 are the same with a minus


def to_mxfp4(path: Path) -> None:
    """Replace the experts of a folder's files by codes, and the folder's numbers by what the codes stand for."""
    generator = torch.Generator().manual_seed(5)
    file = path / "model.safetensors"
    numbers, coded = load_file(file), {}
    for name, tensor in list(numbers.items()):
        if not name.endswith(("gate_up_proj", "down_proj")) or tensor.dim() != 3:
            coded[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=generator)
        dense = torch.where(codes < 8, 1.0, -1.0) * VALUES[codes % 8] * 2.0 ** (scales[..., None] - 127)
        numbers[name] = dense.flatten(2).transpose(1, 2).contiguous()
        coded[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        coded[f"{name}_scales"] = scales.to(torch.uint8)
    other = path.with_name(f"{path.name}-mxfp4")
    other.mkdir()
    (other / "config.json").write_text((path / "config.json").read_text())
    edit_config(other, quantization_config=SECTION)
    save_file(coded, other / "model.safetensors")
    save_file(numbers, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The numbers, and the codes."""
    path = tmp_path_factory.mktemp("gpt_oss") / "numbers"
    make_folder("gpt_oss", path, intermediate_size=96)
    to_mxfp4(path)
    return path, path.with_name("numbers-mxfp4")


@pytest.mark.parametrize("keeps", [False, True])
def test_files_in_mxfp4_are_the_numbers_they_stand_for(folders: tuple[Path, Path], keeps: bool) -> None:
    numbers, codes = folders
    tokens = tokens_of(seed=1, count=60)
    model = load(codes, keep_quantized=keeps)
    kept = [isinstance(experts.format, ScaledExperts) for experts in find_modules([model], Experts)]
    assert kept == [keeps] * 4
    expected = hf_logits(numbers, tokens)
    assert (all_logits(model, tokens) - expected).abs().max() < 1e-4
    assert torch.equal(all_logits(load(numbers), tokens).argmax(-1), expected.argmax(-1))


@torch.inference_mode()
def test_an_engine_with_codes_says_what_one_with_numbers_does(folders: tuple[Path, Path]) -> None:
    numbers, codes = folders
    asks = [Ask(prompt_of(seed, count), greedy(12, ignore_eos=True)) for seed, count in ((1, 40), (2, 7))]
    found = []
    for model in (load(numbers), load(codes, keep_quantized=True)):
        with Rig(model, max_num_batched_tokens=24) as rig:
            found.append(texts_of(rig.run(asks)))
    assert found[0] == found[1]


def test_the_activation_is_the_makers() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1))
    gate, up = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)) * 8
    alternating = torch.stack((gate, up), dim=-1).flatten(1)
    torch.testing.assert_close(reference.clamped_swiglu(torch.cat((gate, up), 1)), experts._apply_gate(alternating))
    assert (gate > 7).any() and (up.abs() > 7).any()


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0), ("hidden_act", "gelu")])
def test_other_activations_are_refused(key: str, value: Any) -> None:
    config = hf_config("gpt_oss").to_dict() | {"architectures": ["GptOssForCausalLM"], key: value}
    with pytest.raises(ConfigError, match=f"{key}={value!r} is not supported"):
        build_model(config, dtype=torch.float32, device="meta")


def test_a_backend_without_sinks_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="layer 0 has attention sinks, which attention_backend='flex' does not serve"):
        Rig(load(folders[0]), attention_backend="flex")


def test_layers_differ_by_their_arithmetic_and_not_by_their_sinks() -> None:
    one, other = (AttentionLayer(0, 2, 1, 16, 0.25, sinks=torch.full((2,), value)) for value in (0.0, 1.0))
    assert one == other and hash(one) == hash(other)
    assert moe.ExpertBiases(torch.zeros(1, 2), None).down is None
