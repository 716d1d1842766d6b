"""transformers in float64 throughout, for comparisons in which any difference is a bug."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.models.oracle import hf_model

TOPK = (torch.topk, torch.Tensor.topk)


class DoubleThroughout(TorchFunctionMode):
    """Within it float32 is float64: transformers computes norms, ropes, routers and the scores of indexers in float32,
    whatever the model's dtype. And `topk` takes the earliest of equal scores, as Outrider does, where torch's takes any
    of them: blocks of a text that repeats itself have equal scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: widened(value) for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in TOPK:
            return earliest_topk(*args, **kwargs)
        return func(*map(widened, args), **kwargs)


def widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def earliest_topk(scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, places = torch.sort(scores, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))


class DoubleOracle:
    """transformers' model of a folder."""

    def __init__(self, folder: Path) -> None:
        with DoubleThroughout():
            self._model = hf_model(folder, torch.float64, experts_implementation="eager", attn_implementation="eager")

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary]"""
        with DoubleThroughout():
            found: torch.Tensor = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        assert found.dtype == torch.float64
        return found
