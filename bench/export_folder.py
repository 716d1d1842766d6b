"""Saves any model source (a GGUF file, a hub id, a folder) as a folder in Hugging Face's form.

    python bench/export_folder.py smollm2 OUT --dtype bfloat16
    python bench/export_folder.py smollm2 OUT --fp8-blocks  # matrices but embedding and head, as in files of DeepSeek

Writes config.json, model.safetensors and, as far as the source has them, tokenizer files: what a machine without the
gguf package, or without a network, needs to run the model. One dtype for all tensors; knows nothing of layers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.engine.text import Tokenizer, TokenizerError
from outrider.kernels.scaled import FP8_MAX
from outrider.models.sources import ModelSource, resolve

DTYPES = ("float32", "bfloat16", "float16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                   "chat_template.json", "generation_config.json")

BLOCK = 128
PLAIN_MODULES = ["embed_tokens", "lm_head"]
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
              "modules_to_not_convert": PLAIN_MODULES}


def export_folder(source: ModelSource, out: Path, dtype: str | None = None, fp8_blocks: bool = False) -> list[str]:
    """`dtype`: of the tensors that are floating; as stored if None. Returns the names of the files."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in source.tensors():
        wanted = tensor.dtype if dtype is None or not tensor.is_floating_point() else getattr(torch, dtype)
        if fp8_blocks and tensor.dim() == 2 and not any(module in name for module in PLAIN_MODULES):
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8_blocks(tensor.float())
        else:
            tensors[name] = tensor.to(wanted).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = source.config | ({} if dtype is None else {"dtype": dtype})
    config |= {"quantization_config": FP8_BLOCKS} if fp8_blocks else {}
    if source.eos_token_ids:
        config["eos_token_id"] = list(source.eos_token_ids)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    _save_tokenizer(source.tokenizer(), out)
    return sorted(path.name for path in out.iterdir())


def to_fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in e4m3, and a scale for each block. The largest number of a block becomes 448 or more, which is cut off
    to 448, whichever of several scales has the smallest squared error: where numbers lie among the codes is chance."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows, BLOCK, columns, BLOCK]
    widest = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / FP8_MAX

    def code(scales: torch.Tensor) -> torch.Tensor:
        return (blocks / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

    best, least = widest, torch.full_like(widest, torch.inf)
    for eighth in range(8):
        scales = widest * 2 ** (-eighth / 8)
        error = (code(scales).float() * scales - blocks).square_().sum((1, 3), keepdim=True)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return code(best).flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), best[:, 0, :, 0].contiguous()


def _save_tokenizer(data: Path | dict[str, Any], out: Path) -> None:
    if isinstance(data, Path):
        for name in TOKENIZER_FILES:
            if (data / name).is_file():
                shutil.copyfile(data / name, out / name)
        return
    try:
        tokenizer = Tokenizer.load(data)
    except TokenizerError as error:
        print(f"no tokenizer: {error}")
        return
    tokenizer.backend.save(str(out / "tokenizer.json"))
    settings: dict[str, Any] = dict(tokenizer.special_tokens)
    if tokenizer.chat_templates:
        settings["chat_template"] = [
            {"name": name, "template": template} for name, template in tokenizer.chat_templates.items()
        ]
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Save a model as a Hugging Face folder.")
    parser.add_argument("model", help="a .gguf file, a folder, a hub id or smollm2")
    parser.add_argument("out", type=Path, help="a folder that is empty or not there")
    parser.add_argument("--dtype", choices=DTYPES, help="of all floating tensors (default: as stored)")
    parser.add_argument("--fp8-blocks", action="store_true", help="matrices in fp8 with a scale for every 128 x 128")
    args = parser.parse_args()
    print(args.out, *export_folder(resolve(args.model), args.out, args.dtype, args.fp8_blocks))


if __name__ == "__main__":
    main()
