"""write_drafter: writes the files of a trained drafter in the form that serving engines load, and a README about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.training.trainee import DrafterCard
from outrider.training.vocabulary import DraftVocabulary
from outrider.training.workspace import replace_file, write_text


def write_drafter(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], vocabulary: DraftVocabulary,
                  method: str, num_drafts: int, card: DrafterCard) -> None:
    """Write the files of a drafter. Weights are in bfloat16: a drafter need not be exact, and engines load it in the
    target's dtype anyway. The config is written last, so a folder with a config is complete."""
    tensors = {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
    tensors |= {"d2t": vocabulary.offsets, "t2d": vocabulary.is_known}
    replace_file(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_text(folder / "README.md", card_text(method, num_drafts, card, folder.name))
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def write_module(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], num_drafts: int,
                 card: DrafterCard) -> None:
    """Write the files of a tuned multi-token-prediction module: its tensors and the target's config."""
    tensors = {name: weight.to("cpu", torch.bfloat16 if weight.is_floating_point() else None).contiguous()
               for name, weight in weights.items()}
    replace_file(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_text(folder / "README.md", card_text("mtp", num_drafts, card, folder.name))
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def card_text(method: str, num_drafts: int, card: DrafterCard, name: str) -> str:
    speculative = json.dumps({"method": method, "model": name, "num_speculative_tokens": num_drafts})
    lines = [
        "---",
        f"base_model: {json.dumps(card.target_name)}",
        "tags: [speculative-decoding, " + method + "]",
        "---",
        f"# A drafter for {card.target_name}",
        "",
        f"A drafter of method `{method}` for speculative decoding, made by `outrider train-drafter` from answers of "
        "the model itself. It changes how fast the model answers, never what it answers.",
        "",
        f"    LLM({json.dumps(card.target_name)}, speculative_config={speculative})",
        "",
        *card.lines,
        "",
        "The folder `training`, if it is there, holds texts and a checkpoint of the run; the drafter works without it.",
    ]
    return "\n".join(lines) + "\n"
