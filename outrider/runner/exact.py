"""Refuses at start-up every setting and operation that exact mode cannot serve, and names it. Each operation declares
whether it is exact (`Exactness`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.config import EngineConfig
from outrider.kernels import cpu as native
from outrider.kernels import ops
from outrider.kernels.cpu.checks import takes_heads
from outrider.mixers import AttentionLayer
from outrider.mixers.paged.codecs import codec_of
from outrider.models.base import Model
from outrider.runner.cache_plan import cache_type_of


def refuse_inexact(config: EngineConfig, model: Model, editors: Sequence[str] = ()) -> None:
    """Raise ValueError if the logits of a request's token could depend on other requests. editors: features that edit
    logits."""
    if config.speculative is not None and config.speculative.is_synthetic:
        raise ValueError("exact=True: synthetic acceptance changes the text on purpose: leave one of the two out")
    if editors:
        raise ValueError(f"exact=True: logits that {' and '.join(editors)} changes are not known to be exact: leave "
                         f"exact out, or start without {' and '.join(editors)}")
    if not codec_of(cache_type_of(config, model.dtype)).is_exact:
        raise ValueError(f"exact=True: kv_cache_dtype={config.kv_cache_dtype!r} has no exact form: use "
                         "kv_cache_dtype='auto'")
    if model.device.type == "cpu":
        _refuse_on_cpu(model)
    else:
        _refuse_on_gpu(model)


def _refuse_on_cpu(model: Model) -> None:
    if model.dtype != torch.float32:
        raise ValueError(f"exact=True: on a CPU the arithmetic of {str(model.dtype).removeprefix('torch.')} adds in an "
                         "order that depends on the batch: use dtype='float32'")
    if not native.available():
        raise ValueError("exact=True: on a CPU exact mode needs the native kernels, which are not available "
                         f"({native.reason()})")
    for layer in model.attention_layers:
        if isinstance(layer, AttentionLayer) and not takes_heads(layer.num_heads, layer.num_kv_heads, layer.head_dim):
            raise ValueError(f"exact=True: the native attention kernel cannot compute layer {layer.index} "
                             f"({layer.num_heads} heads of {layer.head_dim}, {layer.num_kv_heads} KV heads): leave "
                             "exact out")


def _refuse_on_gpu(model: Model) -> None:
    if model.dtype not in ops.SIXTEEN_BITS or not ops.has_triton():
        dtype = str(model.dtype).removeprefix("torch.")
        raise ValueError(f"exact=True: on {model.device.type} exact mode needs Triton and a dtype of 16 bits, and "
                         f"dtype is {dtype}: use dtype='bfloat16' or 'float16', and install triton if it is missing")
