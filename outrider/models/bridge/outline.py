"""Run a model of transformers once on torch's meta device, which takes no memory, and record what it does.

The engine's attention layers are described by the recorded calls: heads, sizes, scale, window, softcap and sinks come
from the code that will run, not from names in a config. A model that does something that pages cannot serve is refused
here with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.mixers import AttentionLayer
from outrider.models.bridge.bridged_attention import CALLED, NAME, OUTLINE, MaskDescriptions, describing, use_function
from outrider.models.bridge.modules import BridgedLinear, WeightIsRead
from outrider.models.bridge.refusal import Unservable, words_of

NUM_TOKENS = 5  # of the run; unlike any number of heads or layers, so that mixed-up axes show
MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)
# Options of attention calls that say nothing about the arithmetic, or that `AttentionCall` holds.
KNOWN_OPTIONS = {"sliding_window", "is_causal", "dropout", "position_ids", "use_cache", "output_attentions",
                 "output_hidden_states", "return_dict", "cache_position", "position_embeddings", "past_key_values",
                 "output_router_logits"}


@dataclass(frozen=True)
class AttentionCall:
    """A recorded call of the attention function by one attention module."""

    name: str  # of the module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None  # the parameter of the module that holds them
    rotary_dim: int  # of the rope that the module was given; 0 if it got none

    @property
    def is_plain(self) -> bool:
        """Whether, according to this call, one attention block of this package may replace the whole module."""
        return self.rotary_dim > 0 and self.key_dim == self.value_dim and self.sinks is None

    def layer(self, index: int) -> AttentionLayer:
        """Return the engine's attention layer for this call, without its sinks. A cache has keys and values of one
        size, so the smaller of the two are padded with zeros."""
        head_dim = max(self.key_dim, self.value_dim)
        return AttentionLayer(index, self.num_heads, self.num_kv_heads, head_dim, self.scale, self.window, self.softcap)


@dataclass
class Outline:
    calls: list[AttentionCall] = field(default_factory=list)
    layers: str = ""  # the name of the list of decoder layers
    makes_tuples: bool = False  # whether decoder layers return the residual stream in a tuple
    hidden_size: int = 0
    shared_inputs: list[list[str]] = field(default_factory=list)  # linear modules called with one tensor, in order


class HostReads(TorchDispatchMode):
    """A torch mode that records whether code asks for a tensor's value. A tensor on the meta device has no value, so
    the code gets 0."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found = True
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _refuse_mixing(model: nn.Module) -> None:
    """Refuse modules that mix tokens outside attention, because in a batch they would mix tokens of different
    requests."""
    for name, module in model.named_modules():
        if isinstance(module, MIXING):
            raise Unservable(f"{name} ({type(module).__name__}) mixes neighbouring tokens outside attention, and the "
                             "engine keeps no state for it")


def outline_model(model: Any, base: nn.Module) -> Outline:
    """Outline a model on the meta device. model: transformers' model; base: the part of it that computes hidden
    states."""
    _refuse_mixing(model)
    outline, masks = Outline(), MaskDescriptions()
    inputs: list[tuple[str, torch.Tensor]] = []  # keeps the tensors alive, so that an identity has one owner
    ropes: dict[str, int] = {}
    makes_tuple: dict[str, bool] = {}
    running: list[str] = []  # modules that have been called and have not returned
    hooks = []
    for name, module in model.named_modules():
        object.__setattr__(module, CALLED, _Recorder(name, module, outline, masks, ropes))
        hooks.append(module.register_forward_pre_hook(_note_inputs(name, module, inputs, ropes, running),
                                                      with_kwargs=True))
        hooks.append(module.register_forward_hook(_note_output(name, makes_tuple, running)))
    tokens, positions = (torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta") for _ in range(2))
    attention_mask = torch.ones(1, NUM_TOKENS, dtype=torch.bool, device="meta")
    use_function(model, OUTLINE)
    try:
        with describing(masks), torch.no_grad(), HostReads():
            made = base(input_ids=tokens, position_ids=positions, attention_mask=attention_mask, use_cache=False)
    except Unservable:
        raise
    except Exception as error:  # code of another package, called as the engine would call it
        name = running[-1] if running else ""
        place = f"{name} ({type(model.get_submodule(name)).__name__})" if name else type(base).__name__
        raise Unservable(f"the model's code failed in {place}: {_reason(error)}") from error
    finally:
        use_function(model, NAME)
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            object.__delattr__(module, CALLED)
    states = made.last_hidden_state
    if tuple(states.shape[:2]) != (1, NUM_TOKENS):
        raise Unservable(f"the model's code makes hidden states of shape {[*states.shape]} from {NUM_TOKENS} tokens")
    outline.hidden_size = states.shape[2]
    outline.layers = _find_layers(model, outline.calls)
    outline.makes_tuples = makes_tuple[f"{outline.layers}.0"]
    outline.shared_inputs = _shared(inputs)
    return outline


def _reason(error: Exception) -> str:
    """Return the reason why a module cannot run, in the engine's words if there are some."""
    if isinstance(error, WeightIsRead):
        return f"the code reads the {error} of a linear layer by itself, and the engine keeps it in a form of its own"
    if isinstance(error, NotImplementedError) and "meta tensor" in str(error):
        return "the code copies values of a tensor to the host, and no step waits for values"
    return words_of(error)


class _Recorder:
    """The attention function that records the call of one module."""

    def __init__(self, name: str, module: nn.Module, outline: Outline, masks: MaskDescriptions,
                 ropes: dict[str, int]) -> None:
        self._name, self._module = name, module
        self._calls, self._masks, self._ropes = outline.calls, masks, ropes

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_mask: Any,
                 scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
                 **options: Any) -> torch.Tensor:
        name, num_tokens = self._name, NUM_TOKENS
        others = [key for key, value in options.items() if key not in KNOWN_OPTIONS and value is not None]
        if others:
            raise Unservable(f"{name} passes {', '.join(others)} to its attention, and the engine's attention has no "
                             f"such {'option' if len(others) == 1 else 'options'}")
        if any(call.name == name for call in self._calls):
            raise Unservable(f"{name} computes attention twice in one pass, and the engine has one cache for each "
                             "layer")
        for part, tensor in (("queries", q), ("keys", k), ("values", v)):
            if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != num_tokens:
                raise Unservable(f"{name} makes {part} of shape {[*tensor.shape]} for {num_tokens} tokens: the engine "
                                 f"needs the shape [1, heads, {num_tokens}, head size]")
        if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
            raise Unservable(f"{name} has queries, keys and values of shapes {[*q.shape]}, {[*k.shape]}, {[*v.shape]}, "
                             "which the engine's attention cannot combine")
        if not isinstance(attention_mask, torch.Tensor) or attention_mask not in self._masks:
            raise Unservable(f"{name} builds its own attention mask, so that the engine does not know which tokens see "
                             "each other")
        scale = k.shape[3] ** -0.5 if scaling is None else float(scaling)
        self._calls.append(AttentionCall(
            name, q.shape[1], k.shape[1], k.shape[3], v.shape[3], scale,
            self._masks.window(attention_mask), softcap or None, None if s_aux is None else self._parameter(s_aux),
            self._ropes.get(name, 0)))
        return q.new_empty(1, num_tokens, q.shape[1], v.shape[3])

    def _parameter(self, sinks: torch.Tensor) -> str:
        for name, parameter in self._module.named_parameters(recurse=False):
            if parameter is sinks and parameter.dim() == 1:
                return name
        raise Unservable(f"{self._name} computes its attention sinks, and the engine needs them as one parameter")


def _note_inputs(name: str, module: nn.Module, inputs: list[tuple[str, torch.Tensor]],
                 ropes: dict[str, int], running: list[str]) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        running.append(name)
        if isinstance(module, BridgedLinear):
            inputs.append((name, args[0]))
        rope = options.get("position_embeddings")
        if isinstance(rope, tuple) and len(rope) == 2 and all(isinstance(part, torch.Tensor) for part in rope):
            if all(tuple(part.shape[:2]) == (1, NUM_TOKENS) and part.dim() == 3 for part in rope):
                ropes[name] = rope[0].shape[-1]

    return note


def _note_output(name: str, makes_tuple: dict[str, bool], running: list[str]) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        running.pop()
        makes_tuple[name] = isinstance(made, tuple)

    return note


def _find_layers(model: nn.Module, calls: list[AttentionCall]) -> str:
    """Return the name of the list of decoder layers. Each of them must have called attention once, in order."""
    if not calls:
        raise Unservable("the model's code never calls the attention function that transformers would give it")
    parts = calls[0].name.split(".")
    lists = [".".join(parts[:index]) for index, part in enumerate(parts) if part == "0"]
    for name in lists:
        layers: Any = model.get_submodule(name)
        if not isinstance(layers, nn.ModuleList):
            continue
        for index in range(len(layers)):
            own = [call for call in calls if call.name.startswith(f"{name}.{index}.")]
            if not own:
                raise Unservable(f"layer {index} never calls its attention function, so that it mixes tokens in a way "
                                 "that the engine does not know")
            if len(own) > 1:
                raise Unservable(f"layer {index} computes attention {len(own)} times, and the engine has one cache for "
                                 "each layer")
            if index >= len(calls) or own[0] is not calls[index]:
                raise Unservable("the model's layers do not run in the order of their list")
        if len(calls) == len(layers):
            return name
    raise Unservable(f"{calls[0].name} does not belong to a list of decoder layers in which every layer has attention")


def _shared(inputs: list[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Return groups of linear modules of one parent that were called consecutively with the same tensor."""
    runs: list[list[str]] = []
    before: torch.Tensor | None = None
    for name, x in inputs:
        if before is x and runs[-1][0].rpartition(".")[0] == name.rpartition(".")[0] and name not in runs[-1]:
            runs[-1].append(name)
        else:
            runs.append([name])
        before = x
    return [run for run in runs if len(run) > 1]
