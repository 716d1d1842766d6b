"""Replace modules of a transformers model by layers of this package that compute the same.

Every replacing layer becomes a part of the bridged model, under the module's name in the checkpoint. So formats, the
loader and features treat it like a layer of a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from outrider.formats import join_names
from outrider.layers import Embedding, Experts, FusedLinear, GatedMLP, HeadNorm, Linear, Module, RMSNorm, SelfAttention
from outrider.layers.norm import CenteredNorm
from outrider.mixers import AttentionLayer
from outrider.models.bridge import known
from outrider.models.bridge.current_step import CurrentStep
from outrider.models.bridge.modules import (
    BridgedAttention,
    BridgedEmbedding,
    BridgedExperts,
    BridgedLinear,
    BridgedMLP,
    BridgedNorm,
    BridgedPart,
    JoinedProduct,
)
from outrider.models.bridge.refusal import Unservable


class Replacements:
    """The layers that replace modules of one model, by their names in the checkpoint."""

    def __init__(self, model: Any, step: CurrentStep, *, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.step = model, step
        self.dtype, self.device = dtype, device
        self.parts: dict[str, Module] = {}
        # The norms of a model are alike: each kind is recognised once.
        self._find_norm = _once_for_each_kind(known.find_norm)
        self._find_mlp = _once_for_each_kind(known.find_mlp)
        self._find_experts = _once_for_each_kind(known.find_experts)

    def replace_known(self, kept: set[str]) -> None:
        """Replace experts, MLPs, norms and linear modules. `kept`: the names of modules that are not replaced."""
        self._replace(nn.Module, self._experts, kept)
        self._replace(nn.Module, self._mlp, kept)
        self._replace(nn.Module, self._norm, kept)
        self._replace(nn.Linear, self._linear, kept)
        for name, module in self.model.named_modules():
            if hasattr(module, "is_transposed") and any(each.dim() == 3 for each in module._parameters.values()
                                                        if each is not None):
                raise Unservable(f"the engine has no kernel for the experts {name} ({type(module).__name__})")

    def replace_embedding(self, name: str) -> Embedding | None:
        """Replace the embedding of token ids, with the factor that its module applies. None if the module computes
        something else."""
        module: Any = self.model.get_submodule(name)
        scale: float | None = 1.0
        if type(module) is not nn.Embedding:
            scale = known.find_embedding_scale(module, self.model._init_weights)
        if scale is None:
            return None
        embedding = Embedding(*module.weight.shape, dtype=self.dtype, device=self.device,
                              scale=None if scale == 1 else scale)
        self._put(name, BridgedEmbedding(embedding, self.step), embedding)
        return embedding

    def replace_attention(self, name: str, layer: AttentionLayer, rotary_dim: int) -> bool:
        """Replace an attention module by one block if it is plain attention with a rope. Returns whether the module was
        replaced."""
        module = self.model.get_submodule(name)
        linears = [module._modules.get(part) for part in (*known.QKV_NAMES, known.OUT_NAME)]
        if not all(isinstance(linear, BridgedLinear) for linear in linears):
            return False
        *qkv, out = [linear.linear for linear in linears if isinstance(linear, BridgedLinear)]
        others = [module._modules.get(part) for part in known.NORM_NAMES]
        norms = [other.norm for other in others if isinstance(other, BridgedNorm)]
        if len(norms) not in (0, 2) or any(norm.size != layer.head_dim or norm.eps != norms[0].eps
                                           or norm.offset != norms[0].offset for norm in norms):
            return False
        if len({linear.declared.has_bias for linear in qkv}) > 1 or not _fits(qkv, out, layer):
            return False
        kinds = tuple(known.KnownNorm(norm.size, norm.eps, norm.offset, isinstance(norm, CenteredNorm))
                      for norm in norms)
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if any(kind.is_centered for kind in kinds) or not known.is_plain_attention(
                module, heads, rotary_dim, (kinds[0], kinds[1]) if kinds else None):
            return False
        options = {"dtype": self.dtype, "device": self.device}
        head_norm = HeadNorm(*heads, norms[0].eps, offset=norms[0].offset, **options) if norms else None
        attention = SelfAttention(layer, int(out.out_features), qkv_bias=qkv[0].declared.has_bias,
                                  out_bias=out.declared.has_bias, head_norm=head_norm, **options)
        for part in (*known.QKV_NAMES, known.OUT_NAME, *known.NORM_NAMES):
            self.parts.pop(join_names(name, part), None)
        self._put(name, BridgedAttention(attention, self.step), attention)
        return True

    def join(self, names: list[str]) -> None:
        """Compute several linear modules with one matrix product, because they are called with the same tensor. names:
        modules of one parent, in the order in which they are called."""
        modules = [self.model.get_submodule(name) for name in names]
        linears = [module.linear for module in modules if isinstance(module, BridgedLinear)]
        parents = {name.rpartition(".")[0] for name in names}
        if len(linears) != len(names) or len(parents) > 1 or len({each.declared.has_bias for each in linears}) > 1:
            return
        sizes = [int(linear.out_features) for linear in linears]
        stored = {name.rpartition(".")[2]: size for name, size in zip(names, sizes, strict=True)}
        fused = FusedLinear(int(linears[0].in_features), stored, bias=linears[0].declared.has_bias, dtype=self.dtype,
                            device=self.device)
        joined = JoinedProduct(fused, sizes, self.step)
        for index, name in enumerate(names):
            del self.parts[name]
            self._set(name, BridgedPart(joined, index))
        self.parts[f"{parents.pop()}: {', '.join(stored)}"] = fused

    def named_parts(self) -> Iterator[tuple[str, Module]]:
        """Yield (prefix of its tensors' names, layer) for each layer."""
        for name, part in self.parts.items():
            yield name.partition(":")[0], part

    def _replace(self, kind: type[nn.Module], make: Callable[[Any], tuple[nn.Module, Module] | None],
                 kept: set[str]) -> None:
        for name, module in [*self.model.named_modules()]:
            if isinstance(module, kind) and name not in kept and (made := make(module)) is not None:
                self._put(name, *made)

    def _put(self, name: str, module: nn.Module, layer: Module) -> None:
        self._set(name, module)
        self.parts[name] = layer

    def _set(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        self.model.get_submodule(parent)._modules[own] = module

    def _linear(self, module: nn.Linear) -> tuple[nn.Module, Module] | None:
        if type(module) is not nn.Linear:  # a subclass may compute something else
            return None
        linear = Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=self.dtype,
                        device=self.device)
        return BridgedLinear(linear, self.step), linear

    def _norm(self, module: nn.Module) -> tuple[nn.Module, Module] | None:
        found = self._find_norm(module)
        if found is None or (found.offset and found.is_centered):
            return None
        kind = CenteredNorm if found.is_centered else RMSNorm
        norm = kind(found.size, found.eps, dtype=self.dtype, device=self.device, offset=found.offset)
        return BridgedNorm(norm, self.step), norm

    def _mlp(self, module: nn.Module) -> tuple[nn.Module, Module] | None:
        found = self._find_mlp(module)
        if found is None:
            return None
        linears = [child for child in module.children() if type(child) is nn.Linear]
        if len({linear.bias is None for linear in linears}) > 1:
            return None
        down = linears[-1]
        mlp = GatedMLP(down.out_features, down.in_features, activation=found.activation, bias=down.bias is not None,
                       is_packed=found.is_packed, dtype=self.dtype, device=self.device)
        return BridgedMLP(mlp, self.step), mlp

    def _experts(self, module: nn.Module) -> tuple[nn.Module, Module] | None:
        found = self._find_experts(module)
        if found is None:
            return None
        experts = Experts(found.num_experts, found.hidden_size, found.expert_size, activation=found.activation,
                          dtype=self.dtype, device=self.device)
        return BridgedExperts(experts, self.step), experts


def _fits(qkv: list[Linear], out: Linear, layer: AttentionLayer) -> bool:
    q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    return [int(linear.out_features) for linear in qkv] == [q_size, kv_size, kv_size] \
        and int(out.in_features) == q_size and int(qkv[0].in_features) == int(out.out_features)


def _once_for_each_kind(find: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Cache `find` over modules of one class with equal settings and shapes."""
    examples: dict[Any, nn.Module] = {}
    cached = lru_cache(maxsize=None)(lambda kind: find(examples[kind]))

    def found(module: nn.Module) -> Any:
        kind = _kind_of(module)
        examples.setdefault(kind, module)
        return cached(kind)

    return found


def _kind_of(module: nn.Module) -> tuple[Any, ...]:
    settings = tuple((name, value) for name, value in module.__dict__.items()
                     if isinstance(value, (bool, int, float, str)) and name != "layer_idx")
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())
    children = tuple((name, type(child)) for name, child in module.named_children())
    return type(module), settings, shapes, children
