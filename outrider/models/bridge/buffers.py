"""Allocate, on the device, the parameters and buffers of modules that layers of this package do not replace.

A model is built on the meta device, so the values that its constructors computed, such as the frequencies of ropes, are
lost. transformers recomputes them whenever it loads a model; here it does so too, and the result is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from outrider.models.bridge.refusal import Unservable, words_of


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether checkpoints contain this buffer of the module."""
    return name not in module._non_persistent_buffers_set


def allocate(model: Any, sinks: set[str], *, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Give all parameters and buffers of a model memory on the device. Return those that a checkpoint fills, by name.
    sinks: names of the parameters that the engine's attention reads."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kept = _kept_wide(model, dtype)
    filled: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                path = f"{prefix}.{name}"
                own = wide if path in sinks or any(pattern.search(path) for pattern in kept) else dtype
                tensor = torch.empty(parameter.shape, dtype=own, device=device)
                module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
                filled[path] = tensor
        for name, buffer in module._buffers.items():
            if buffer is not None and is_persistent(module, name):
                own = wide if buffer.is_floating_point() else buffer.dtype  # corrections that 16 bits would round away
                module._buffers[name] = filled[f"{prefix}.{name}"] = torch.empty(buffer.shape, dtype=own, device=device)
    if device.type != "meta":
        owners: dict[str, Any] = {}  # of each module: the innermost model around it, which knows its values
        for prefix, module in model.named_modules():
            owners[prefix] = module if hasattr(module, "_init_weights") else owners[prefix.rpartition(".")[0]]
            _compute_buffers(owners[prefix], prefix, module, device)
    return filled


def _kept_wide(model: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Patterns for the names of parameters that transformers keeps in float32 in a 16-bit model."""
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return [re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in names]


def _compute_buffers(model: Any, prefix: str, module: nn.Module, device: torch.device) -> None:
    """Let transformers compute a module's buffers twice, into zeros and into ones. Different results mean that it did
    not write all values, which is an error."""
    own = dict(_lost_buffers(module))
    if not own:
        return
    made: list[dict[str, torch.Tensor]] = []
    for filling in (0, 1):
        for name, buffer in own.items():
            module._buffers[name] = torch.full(buffer.shape, filling, dtype=buffer.dtype, device=device)
        try:
            with torch.no_grad():
                model._init_weights(module)
        except Exception as error:  # code of another package
            raise Unservable(f"transformers cannot compute the tables of {prefix} again after loading: "
                             f"{words_of(error)}") from error
        made.append({name: module._buffers[name].clone() for name in own})
    for name in own:
        if not torch.equal(made[0][name], made[1][name]):
            raise Unservable(f"{prefix}.{name} is a table that transformers does not compute again after loading")


def _lost_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in module._buffers.items():
        if buffer is not None and not is_persistent(module, name):
            yield name, buffer
