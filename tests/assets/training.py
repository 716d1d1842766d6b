"""What the training scripts beside this file share: the small language, the loop that fits, and how tensors are saved.

Plain torch, no code of outrider's. The language: a token names a mode, then streams of symbols take turns, and each
goes on by the mode's own permutation of the symbols (one long cycle), with a little noise. So the next token depends on
the mode and on a token some places back; and no pair of neighbours is likely to come twice, so that n-gram lookup finds
nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent

Params = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


class Language:
    """Symbols are scattered over the vocabulary; the first ids name the modes."""

    def __init__(self, vocab: int, symbols: int, modes: int, streams: int, noise: float = 0.02, seed: int = 1) -> None:
        self.num_modes, self.num_streams, self.noise = modes, streams, noise
        generator = torch.Generator().manual_seed(seed)
        self.symbols = (torch.randperm(vocab - modes, generator=generator)[:symbols] + modes).sort().values
        self.follows = torch.empty(modes, symbols, dtype=torch.int64)
        for mode in range(modes):
            cycle = torch.randperm(symbols, generator=generator)
            self.follows[mode, cycle] = cycle.roll(-1)

    def texts(self, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """[count, length] token ids, a mode first."""
        streams, num_symbols = self.num_streams, len(self.symbols)
        mode = torch.randint(self.num_modes, (count,), generator=generator)
        index = torch.empty(count, length, dtype=torch.int64)
        index[:, :streams] = torch.randint(num_symbols, (count, streams), generator=generator)
        noise = torch.rand(count, length, generator=generator) < self.noise
        other = torch.randint(num_symbols, (count, length), generator=generator)
        for t in range(streams, length):
            index[:, t] = torch.where(noise[:, t], other[:, t], self.follows[mode, index[:, t - streams]])
        return torch.cat((mode[:, None], self.symbols[index[:, : length - 1]]), dim=1)

    def share_right(self, text: list[int], first: int, mode: int) -> float:
        """How much of text[first:] goes on by the mode's permutation; to see whether a model speaks the language."""
        index_of = {int(token): i for i, token in enumerate(self.symbols)}
        right = 0
        for t in range(first, len(text)):
            before = index_of.get(text[t - self.num_streams])
            right += before is not None and text[t] == int(self.symbols[self.follows[mode, before]])
        return right / (len(text) - first)


def fresh(shapes: Shapes, seed: int) -> Params:
    """Vectors of ones; matrices wide enough to learn from in a few hundred steps."""
    generator = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            values = torch.ones(shape)
        else:
            values = torch.randn(shape, generator=generator) * (1.0 if "embed" in name else shape[1] ** -0.5)
        params[name] = values.requires_grad_()
    return params


def fit(parameters: Iterable[torch.Tensor], steps: int, rate: float, loss_of: Callable[[], torch.Tensor],
        name: str) -> None:
    params = list(parameters)
    optimizer = torch.optim.AdamW(params, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.perf_counter()
    for step in range(steps):
        warm, progress = min(1.0, (step + 1) / 50), step / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (0.5 + 0.5 * math.cos(math.pi * progress))
        loss = loss_of()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"{name} {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)


def rounded(params: Params) -> Params:
    """As they will be saved, so that a drafter is trained for the target that is."""
    return {name: value.detach().half().float() for name, value in params.items()}


def save(folder: Path, config: dict[str, object], tensors: Params) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    halves = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
