"""Single tensors of a GGUF file: their names in Hugging Face's form, and their bytes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from outrider.models.sources.base import SourceError
from outrider.models.sources.gguf_header import TensorEntry

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSOR_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
KEPT_KINDS = ("Q8_0", "Q4_0", "Q4_1")  # kinds that a layer can keep in the file's own bits
ROPE_FACTORS = "rope_freqs.weight"  # not a weight: divisors of the rope's frequencies


def hf_name(name: str, path: Path) -> str:
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if found and found[2] in LAYER_TENSOR_NAMES:
        return f"model.layers.{found[1]}.{LAYER_TENSOR_NAMES[found[2]]}"
    raise SourceError(f"{path}: tensor {name!r} does not belong to a Llama model as Outrider knows it")


def raw_bytes(path: Path, entry: TensorEntry) -> np.ndarray:
    raw = np.fromfile(path, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
    if raw.size != entry.num_bytes:  # the file was cut after its header was read
        raise SourceError(f"{path} is cut off: tensor {entry.name!r} is not complete. Fetch it again.")
    return raw


def dequantised(raw: np.ndarray, entry: TensorEntry) -> np.ndarray:
    """The numbers of stored rows, by the gguf library."""
    from gguf.constants import GGMLQuantizationType  # with YAML and more, which most files do not need
    from gguf.quants import dequantize

    return dequantize(raw, GGMLQuantizationType(entry.kind))
