"""Recognise modules of transformers by what they compute.

A copy of the module gets small random weights. Its results for inputs of several sizes are compared with a layer of
this package: large inputs show limits, small ones epsilons. Class names do not matter, so copies of a module in other
models, and in later versions, are recognised too. A module that computes something else is not replaced, which is
slower but as correct."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from outrider.models.bridge.bridged_attention import CALLED, NAME

CLOSE = 1e-5  # relative to the largest result: modules compute some steps in float32
SCALES = (1e-3, 0.25, 1.0, 1e3)  # of inputs
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
GATED_NAMES, PACKED_NAMES = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
QKV_NAMES, OUT_NAME, NORM_NAMES = ("q_proj", "k_proj", "v_proj"), "o_proj", ("q_norm", "k_norm")


class KnownNorm(NamedTuple):
    """A recognised norm over the last axis with one scale for each feature."""

    size: int
    eps: float
    offset: bool  # scales by 1 + weight
    is_centered: bool  # takes the mean off


class KnownMLP(NamedTuple):
    """A recognised gated MLP: down(act(gate(x)) * up(x))."""

    activation: str
    is_packed: bool  # gate and up are one product


class KnownExperts(NamedTuple):
    num_experts: int
    hidden_size: int
    expert_size: int
    activation: str


def find_norm(module: nn.Module) -> KnownNorm | None:
    eps = next((getattr(module, name) for name in EPS_NAMES if hasattr(module, name)), None)
    if [*module._parameters] != ["weight"] or module._modules or module._buffers or not isinstance(eps, float):
        return None
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1:
        return None
    size = len(weight)
    draw = _Draw()
    scale, inputs = 1 + draw(size), _scaled(3 * draw(3, size) + 0.5)
    small = _copy_of(module, parameters={"weight": scale})
    found = [_result(small, x) for x in inputs]
    for offset in (False, True):
        for is_centered in (False, True):
            if _are_close(found, [norm(x, scale, eps, offset, is_centered) for x in inputs]):
                return KnownNorm(size, eps, offset, is_centered)
    return None


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, is_centered: bool) -> torch.Tensor:
    x = x - x.mean(-1, keepdim=True) if is_centered else x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight if offset else weight)


def find_embedding_scale(module: nn.Module, compute_buffers: Callable[[nn.Module], None]) -> float | None:
    """Return the factor by which an embedding module scales the rows of its table. None if it computes something else.
    compute_buffers: a function that gives the module's buffers their initial values."""
    draw, tokens = _Draw(), torch.tensor([[3, 0, 2]])
    table = draw(5, 8)
    small = _copy_of(module, parameters={"weight": table.clone()})
    small._buffers = {name: torch.zeros(buffer.shape) for name, buffer in module._buffers.items() if buffer is not None}
    compute_buffers(small)
    small._parameters["weight"] = nn.Parameter(table, requires_grad=False)
    found = _result(small, tokens)
    if not isinstance(found, torch.Tensor) or found.shape != (1, 3, 8):
        return None
    scale = float((found[0, 0, 0] / table[3, 0]).item())
    return scale if _is_close(found, table[tokens] * scale) else None


def find_mlp(module: nn.Module) -> KnownMLP | None:
    linears = [name for name, child in module._modules.items() if type(child) is nn.Linear]
    if (*linears,) not in (GATED_NAMES, PACKED_NAMES) or module._parameters or module._buffers:
        return None
    is_packed, draw, hidden, width = (*linears,) == PACKED_NAMES, _Draw(), 8, 6
    gate, up, down, inputs = draw(width, hidden), draw(width, hidden), draw(hidden, width), _scaled(2 * draw(3, hidden))
    weights = {"gate_up_proj": torch.cat((gate, up))} if is_packed else {"gate_proj": gate, "up_proj": up}
    parts = {name: _linear(weight) for name, weight in (weights | {"down_proj": down}).items()}
    small = _copy_of(module, modules=parts)
    found = [_result(small, x) for x in inputs]
    for name, activation in ACTIVATIONS.items():
        if _are_close(found, [(activation(x @ gate.T) * (x @ up.T)) @ down.T for x in inputs]):
            return KnownMLP(name, is_packed)
    return None


def find_experts(module: nn.Module) -> KnownExperts | None:
    """Recognise experts with weights in two tensors, [experts, gate | up, hidden] and [experts, hidden, inner]."""
    joint, down = (module._parameters.get(name) for name in PACKED_NAMES)
    if {*module._parameters} != {*PACKED_NAMES} or joint is None or down is None or joint.dim() != 3:
        return None
    num_experts, hidden_size, expert_size = down.shape
    if tuple(joint.shape) != (num_experts, 2 * expert_size, hidden_size):
        return None
    draw, count, hidden, width = _Draw(), 3, 8, 6
    tensors = {"gate_up_proj": draw(count, 2 * width, hidden), "down_proj": draw(count, hidden, width)}
    ids, weights = torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2]]), draw(4, 2).abs()
    inputs = _scaled(2 * draw(4, hidden))
    small = _copy_of(module, parameters=tensors)
    small.num_experts, small.hidden_dim, small.intermediate_dim = count, hidden, width
    small.config = SimpleNamespace(_experts_implementation="eager")
    found = [_result(small, x, ids, weights) for x in inputs]
    for name, activation in ACTIVATIONS.items():
        expected = []
        for x in inputs:
            gate, up = torch.einsum("th,tkih->tki", x, tensors["gate_up_proj"][ids]).chunk(2, dim=-1)
            mixed = torch.einsum("tki,tkhi->tkh", activation(gate) * up, tensors["down_proj"][ids])
            expected.append((mixed * weights[..., None]).sum(1))
        if _are_close(found, expected):
            return KnownExperts(num_experts, hidden_size, expert_size, name)
    return None


def is_plain_attention(module: nn.Module, heads: tuple[int, int, int], rotary_dim: int,
                       norms: tuple[KnownNorm, KnownNorm] | None) -> bool:
    """Whether an attention module computes q, k and v by three products, norms q and k heads (if there are norms),
    rotates halves of q and k heads, attends, and multiplies by an output matrix. heads: the numbers of q and kv heads,
    and their size."""
    num_heads, num_kv_heads, dim = heads
    draw, hidden, tokens = _Draw(), 8, 5
    weights = {name: draw(count * dim, hidden) for name, count in
               zip(QKV_NAMES, (num_heads, num_kv_heads, num_kv_heads), strict=True)}
    scales = {name: 1 + draw(dim) for name in NORM_NAMES}
    out_weight = draw(hidden, num_heads * dim)
    attended, inputs = _scaled(draw(1, tokens, num_heads, dim)), _scaled(draw(1, tokens, hidden))
    cos, sin = (draw(1, tokens, rotary_dim // 2).repeat(1, 1, 2) for _ in range(2))
    parts: dict[str, nn.Module] = {name: _linear(weight) for name, weight in weights.items()}
    parts[OUT_NAME] = _linear(out_weight)
    for name, known in zip(NORM_NAMES, norms or (), strict=False):
        parts[name] = _Norm(scales[name], known)
    small = _copy_of(module, modules=parts)
    small.config = copy.copy(small.config)
    small.config._attn_implementation = NAME
    for x, made in zip(inputs, attended, strict=True):
        seen: list[torch.Tensor] = []
        object.__setattr__(small, CALLED, partial(_note_and_return, seen, made))
        found = _result(small, hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
        if not isinstance(found, tuple) or not _is_close(found[0], made.flatten(2) @ out_weight.T):
            return False
        expected = []
        for index, name in enumerate(QKV_NAMES):
            part = (x @ weights[name].T).unflatten(-1, (-1, dim)).transpose(1, 2)
            if index < 2:
                if norms is not None:
                    known = norms[index]
                    part = norm(part, scales[NORM_NAMES[index]], known.eps, known.offset, known.is_centered)
                part = _turned(part, cos[:, None], sin[:, None])
            expected.append(part)
        if not _are_close(seen, expected):
            return False
    return True


def _note_and_return(seen: list[torch.Tensor], made: torch.Tensor, *qkv: torch.Tensor, **_: Any) -> torch.Tensor:
    seen[:] = qkv
    return made


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    dim = cos.shape[-1]
    turning, still = x[..., :dim], x[..., dim:]
    first, second = turning.chunk(2, dim=-1)
    return torch.cat((turning * cos + torch.cat((-second, first), dim=-1) * sin, still), dim=-1)


class _Draw:
    """Random numbers that are the same in every check."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device="cpu", dtype=torch.float64)


class _Norm(nn.Module):
    def __init__(self, scale: torch.Tensor, known: KnownNorm) -> None:
        super().__init__()
        self.scale, self.known = scale, known

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = self.known
        return norm(x, self.scale, known.eps, known.offset, known.is_centered)


def _linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    return made


def _copy_of(module: nn.Module, *, parameters: dict[str, torch.Tensor] | None = None,
             modules: dict[str, nn.Module] | None = None) -> Any:
    """Return a copy of the module with some parameters and modules replaced. The module itself is not changed."""
    made = copy.copy(module)
    made._parameters = {**module._parameters, **{name: nn.Parameter(value, requires_grad=False)
                                                 for name, value in (parameters or {}).items()}}
    made._modules = {**module._modules, **(modules or {})}
    return made


def _result(module: nn.Module, *args: Any, **options: Any) -> Any:
    """Return the module's result. None if it cannot be called with these arguments, which means that it is not
    recognised."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            return module(*args, **options)
    except Exception:  # code of another package, with weights that it was not made for
        return None


def _scaled(x: torch.Tensor) -> list[torch.Tensor]:
    return [scale * x for scale in SCALES]


def _are_close(found: Sequence[Any], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(_is_close(*pair) for pair in zip(found, expected, strict=True))


def _is_close(found: Any, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and not found.is_meta \
        and bool((found.double() - expected).abs().max() <= CLOSE * expected.abs().max())
