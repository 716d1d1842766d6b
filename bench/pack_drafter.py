"""Packs a trained EAGLE-3 head into the form that is shipped: 8-bit rows, and no output of its own.

    python bench/pack_drafter.py smollm2 DRAFTER OUT

The head must have been trained with the target's output rows (`train-drafter --freeze-output`): the packed config says
`target_output_rows`, and the engine takes these rows from the target. Matrices get a scale for each output and integers
of 8 bits (compressed-tensors, int-quantized). Prints sizes, the largest rounding error and the hash of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.commands.loading import load
from outrider.config import EngineConfig

QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": [],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}}},
}
LEFT_OUT = ("lm_head.weight", "t2d", "embed_tokens.weight")
MOST_DIFFERENCE = 2**-7  # of an output row from the target's, relative to its largest number: bfloat16 rounds by 2^-9


def packed(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
    """(the tensors of the packed form, the largest error of a weight relative to the largest of its row)"""
    result: dict[str, torch.Tensor] = {}
    worst = 0.0
    for name, tensor in tensors.items():
        own = re.sub(r"^midlayer\.", "layers.0.", name)
        if own in LEFT_OUT:
            continue
        if own == "d2t":
            result[own] = tensor.to(torch.int32)
        elif tensor.ndim == 2:
            weight = tensor.float()
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            codes = (weight / scale).round().to(torch.int8)
            worst = max(worst, float(((codes * scale - weight).abs() / (127 * scale)).max()))
            result |= {own: codes, own.replace(".weight", ".weight_scale"): scale}
        else:
            result[own] = tensor
    return result, worst


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
    small, worst = packed(tensors)
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(small, args.out / "model.safetensors", metadata={"format": "pt"})
    config |= {"target_output_rows": True, "quantization_config": QUANTIZATION}
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    data = (args.out / "model.safetensors").read_bytes()
    print(f"{len(data)} bytes, largest error of a weight {worst:.2%} of the largest of its row, output rows within "
          f"{difference:.2%} of the target's")
    print(hashlib.sha256(data).hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
