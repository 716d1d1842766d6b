"""Adapters made by PEFT on tiny models of transformers, and what PEFT computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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
def peft_logits(folder: Path, adapter: Path | None, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = peft_model(folder, adapter)(tokens[None]).logits[0]
    return logits


@torch.no_grad()
def peft_greedy(folder: Path, adapter: Path | None, prompt: list[int], count: int) -> list[int]:
    text = peft_model(folder, adapter).generate(input_ids=torch.tensor([prompt]), max_new_tokens=count, do_sample=False,
                                                eos_token_id=None, pad_token_id=0)
    answer: list[int] = text[0, len(prompt) :].tolist()
    return answer
