"""Quantised files of families whose tensors have other names there than in the model, or lie in one tensor of all
experts: they keep their bits, with the tokens of their numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from outrider.formats.scaled import ScaledExperts
from outrider.layers.base import find_modules
from outrider.layers.moe import Experts
from outrider.models.lfm2 import TENSORS
from outrider.models.sources.model_source import WeightError
from tests.models import quantized_files as files
from tests.models.test_quantized_files import load
from tests.ranks.families import config_of
from tests.unit.test_extending import outcome

# The model's names, or parts of them, and what files have in their place.
LFM2 = {own: theirs for theirs, own in TENSORS.items()}
GRANITE = {"block_sparse_moe.shared_mlp.": "shared_mlp.", "shared_mlp.gate_up_proj.": "shared_mlp.input_linear.",
           "shared_mlp.down_proj.": "shared_mlp.output_linear.",
           "block_sparse_moe.gate.": "block_sparse_moe.router.layer."}
JOINT = {"gate_up_proj": "block_sparse_moe.input_linear", "down_proj": "block_sparse_moe.output_linear"}
KIMI = {".0.mlp.": ".0.block_sparse_moe."}


def renamed(name: str, names: Mapping[str, str]) -> str:
    for own, theirs in names.items():
        name = name.replace(own, theirs)
    return name


def write(folder: Path, family: str, form: files.Form, names: Mapping[str, str], joins: bool = False) -> set[str]:
    """Write a quantised model with the names of its makers. Returns the model's names of the matrices in codes."""
    config = config_of(family)
    tensors: files.Tensors = {}
    of_experts: dict[tuple[str, str], list[torch.Tensor]] = {}
    coded = set()
    for name, weight in files.plain_weights(config).items():
        if not re.search(r"(_proj|\.w\d)\.weight$", name) or "kv_b_proj" in name:
            tensors[renamed(name, names)] = weight
            continue
        coded.add(name)
        layer, _, expert = name.partition(".block_sparse_moe.experts.")
        if joins and expert:
            of_experts.setdefault((layer, expert.split(".")[1]), []).append(weight)
            continue
        matrix = renamed(name, names).removesuffix(".weight")
        tensors |= {matrix + suffix: part.clone() for suffix, part in form.write(weight)[0].items()}
    for layer in {layer for layer, _ in of_experts}:
        gate, up = (of_experts[layer, part] for part in ("gate_proj", "up_proj"))
        joint = {"gate_up_proj": list(map(torch.cat, zip(gate, up, strict=True))),
                 "down_proj": of_experts[layer, "down_proj"]}
        for projection, weights in joint.items():
            parts = [form.write(weight)[0] for weight in weights]
            tensors |= {f"{layer}.{JOINT[projection]}{suffix}": torch.stack([part[suffix] for part in parts])
                        for suffix in parts[0]}
    files.save_folder(folder, tensors, config | {"quantization_config": form.settings})
    return coded


@pytest.mark.parametrize(("family", "form", "names", "joins"), [
    ("lfm2", "FP8_DYNAMIC", LFM2, False),
    ("lfm2", "GPTQ", LFM2, False),
    ("granite_hybrid_dense", "FP8_DYNAMIC", GRANITE, False),
    ("granite_hybrid", "FP8_DYNAMIC", GRANITE, False),
    ("granite_hybrid", "FP8_DYNAMIC", GRANITE, True),
    ("granite_hybrid", "FP8_BLOCK", GRANITE, True),
    pytest.param("granite_hybrid", "FP8", GRANITE, True, marks=pytest.mark.long),
    pytest.param("granite_hybrid", "W8A8", GRANITE, True, marks=pytest.mark.long),
    ("kimi_linear", "FP8_DYNAMIC", KIMI, False),
])
def test_matrices_of_other_names_keep_their_bits(family: str, form: str, names: dict[str, str], joins: bool,
                                                 tmp_path: Path) -> None:
    coded = write(tmp_path / "model", family, files.FORMS[form], names, joins)
    kept, dense = load(tmp_path / "model"), load(tmp_path / "model", keep_quantized=False)
    expanded = {name for name in coded if kept.weights()[name].kind is None}
    assert coded and not expanded
    assert all(isinstance(experts.format, ScaledExperts) for experts in find_modules([kept], Experts))
    assert outcome(kept) == outcome(dense)


def test_scales_of_another_number_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    form = files.FORMS["FP8_DYNAMIC"]

    def without_an_expert(weight: torch.Tensor) -> tuple[files.Tensors, torch.Tensor]:
        tensors, numbers = form.write(weight)
        return tensors | {".weight_scale": tensors[".weight_scale"][:0]}, numbers

    broken = files.Form(form.settings, without_an_expert, form.bits)
    write(tmp_path / "model", "granite_hybrid", broken, GRANITE, joins=True)
    with pytest.raises(WeightError, match=r"the scales of model.layers.*_linear have shape"):
        load(tmp_path / "model")
