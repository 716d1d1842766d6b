"""Adapters made by PEFT on tiny models of transformers, and what PEFT computes with them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.features.adapters.experts_target import ExpertsTarget
from outrider.features.adapters.target import EmbeddingTarget, ExpansionTarget, LinearTarget
from outrider.features.adapters.targets import Targets
from outrider.models.base import Model
from tests.models import oracle


def hf_model(folder: Path) -> Any:
    """The model in float64, in which transformers' grouped products of experts do not work."""
    return oracle.hf_model(folder, torch.float64, experts_implementation="eager")


def make_adapter(folder: Path, path: Path, seed: int = 0, **config: Any) -> Path:
    """Save an adapter with random factors for the model of a folder."""
    import peft

    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    torch.manual_seed(seed)
    model = peft.get_peft_model(hf_model(folder), peft.LoraConfig(**values | config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    return path


def peft_model(folder: Path, adapter: Path | None) -> Any:
    import peft

    base = hf_model(folder)
    if adapter is None:
        return base
    return peft.PeftModel.from_pretrained(base, adapter).eval()


@torch.no_grad()
def peft_greedy(folder: Path, adapter: Path | None, prompt: list[int], count: int) -> list[int]:
    text = peft_model(folder, adapter).generate(input_ids=torch.tensor([prompt]), max_new_tokens=count, do_sample=False,
                                                eos_token_id=None, pad_token_id=0)
    answer: list[int] = text[0, len(prompt) :].tolist()
    return answer


def write_adapter(path: Path, model: Model, seed: int, rank: int = 4, scale: float = 0.2,
                  names: tuple[str, ...] = ("",)) -> Path:
    """An adapter with random factors for the linear layers of a model whose names end like these, without PEFT."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for target in linear_targets(model):
        if target.name.endswith(names):
            inputs, outputs = target.linear.declared.in_features, target.segment.size
            for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
                tensors[f"base_model.model.model.{target.name}.lora_{factor}.weight"] = values
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def write_adapter_of_all(path: Path, model: Model, seed: int, rank: int = 4, scale: float = 0.2) -> Path:
    """An adapter with random factors for every product of a whole model that an adapter may change."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()

    def add(name: str, end: str, *shape: int) -> None:
        drawn = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        tensors[f"base_model.model.model.{name}.{end}"] = drawn

    for target in Targets.from_model(model).all:
        match target:
            case ExpertsTarget():
                count, matrix = target.experts.num_experts, next(iter(target.parts))
                add(f"{target.name}.{matrix}", "lora_A.weight", count, rank, target.num_inputs)
                add(f"{target.name}.{matrix}", "lora_B.weight", count, target.num_outputs, rank)
            case EmbeddingTarget():
                add(target.name, "lora_embedding_A", rank, target.vocab_size)
                add(target.name, "lora_embedding_B", target.embedding.declared.in_features, rank)
            case LinearTarget() | ExpansionTarget():
                is_linear = isinstance(target, LinearTarget)
                declared = target.linear.declared if is_linear else target.expansion.declared
                size = target.segment.size if is_linear else declared.segments[0].size
                add(target.name, "lora_A.weight", rank, declared.in_features)
                add(target.name, "lora_B.weight", size, rank)
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def linear_targets(model: Model) -> list[LinearTarget]:
    return [target for target in Targets.from_model(model).all if isinstance(target, LinearTarget)]


def merged(model: Model, path: Path) -> Model:
    """A copy of a model whose weights have an adapter's changes added."""
    tensors = load_file(path / "adapter_model.safetensors")
    own = copy.deepcopy(model)
    for target in linear_targets(own):
        name = f"base_model.model.model.{target.name}"
        if f"{name}.lora_A.weight" in tensors:
            change = 2 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
            dense = target.linear.format.dense()
            assert dense is not None and target.segment.layout is None
            dense[target.segment.rows.start : target.segment.rows.stop].add_(change)
    own.finalize()
    return own
