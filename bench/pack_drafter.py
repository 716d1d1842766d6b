"""Packs a trained EAGLE-3 head into the form that is shipped: rows of 4 bits, and no output of its own.

    python bench/pack_drafter.py smollm2 DRAFTER OUT

The head must have been trained with the target's output rows (`train-drafter --freeze-output`): the packed config says
`target_output_rows`, and the engine takes these rows from the target. Matrices get integers of 4 bits and a scale for
every 32 inputs (compressed-tensors, pack-quantized). Prints sizes, the rounding error and the hash of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.commands.loading import load
from outrider.config import EngineConfig

GROUP = 32  # inputs that share a scale
QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": [],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}}},
}
# Scales that are tried, relative to the one by which the largest number of a group is code -8.
TRIED = (1.15, 1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
LEFT_OUT = ("lm_head.weight", "t2d", "embed_tokens.weight")
MOST_DIFFERENCE = 2**-7  # of an output row from the target's, relative to its largest number: bfloat16 rounds by 2^-9


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes from -8 to 7 [outputs, inputs], scales [outputs, groups] in bfloat16), of the scales that are tried those
    with the smallest sum of squared errors. A scale is negative where the largest number of a group is positive."""
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    tried = torch.stack([(largest * (factor / -8)).bfloat16().float() for factor in TRIED])
    tried = torch.where(tried == 0, 1.0, tried)
    codes = (groups / tried).round().clamp(-8, 7)
    best = (codes * tried - groups).square().sum(3, keepdim=True).argmin(0, keepdim=True)
    codes = codes.gather(0, best.expand(1, *groups.shape))[0]
    return codes.flatten(1), tried.gather(0, best)[0].flatten(1).bfloat16()


def words(codes: torch.Tensor) -> torch.Tensor:
    """Codes plus 8 in int32 words, eight in each, the first in the lowest bits."""
    parts = (codes.long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return parts.sum(2).to(torch.int32)


def packed(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
    """(the tensors of the packed form, the root of the mean squared error of the weights relative to theirs)"""
    result: dict[str, torch.Tensor] = {}
    error = total = 0.0
    for name, tensor in tensors.items():
        own = re.sub(r"^midlayer\.", "layers.0.", name)
        if own in LEFT_OUT:
            continue
        if own == "d2t":
            result[own] = tensor.to(torch.int32)
        elif tensor.ndim == 2:
            weight = tensor.float()
            codes, scale = rounded(weight)
            numbers = codes * scale.float().repeat_interleave(GROUP, 1)
            error += float((numbers - weight).square().sum())
            total += float(weight.square().sum())
            result |= {f"{own}_packed": words(codes), f"{own}_scale": scale,
                       f"{own}_shape": torch.tensor(weight.shape)}
        else:
            result[own] = tensor
    return result, math.sqrt(error / total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tensors = load_file(args.drafter / "model.safetensors")
    config = json.loads((args.drafter / "config.json").read_text())
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    target = load(EngineConfig(args.target, device="cpu", speculative_config=None), needs_text=False)
    rows = target.model.lm_head.format.dense()[ids]
    difference = ((tensors["lm_head.weight"].float() - rows).abs().amax(1) / rows.abs().amax(1).clamp_min(1e-12)).max()
    if difference > MOST_DIFFERENCE:
        print(f"output rows differ from the target's by {difference:.2%}: train with --freeze-output", file=sys.stderr)
        return 1
    small, error = packed(tensors)
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(small, args.out / "model.safetensors", metadata={"format": "pt"})
    config |= {"target_output_rows": True, "quantization_config": QUANTIZATION}
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    data = (args.out / "model.safetensors").read_bytes()
    print(f"{len(data)} bytes, error of weights {error:.2%}, output rows within {difference:.2%} of the target's")
    print(hashlib.sha256(data).hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
