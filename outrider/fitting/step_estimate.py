"""Estimates the memory of a model's steps without running them. An engine on a GPU measures it (`graphs/warm_up.py`),
but a plan is made before the model is loaded, perhaps for another machine.

The memory of rows and graphs is computed as at start-up. For the largest step only the widest tensors are counted, with
an allowance for the scratch memory of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from outrider.cache.groups import CacheLayout
from outrider.core import Axis, Limits
from outrider.formats import ExpertsDeclaration
from outrider.layers import LayeredModule, Linear, Router, find_modules
from outrider.layers.moe import Experts
from outrider.models.base import Model
from outrider.runner.graphs.warm_up import graph_bytes, largest_step
from outrider.runner.memory import FeatureBytes, StepMemory
from outrider.runner.row_state import RowState
from outrider.runner.storages import find_storages
from outrider.sample.sampler import KERNEL_CHUNK_ELEMENTS

STREAMS = 5  # residual, normed rows and results of a layer that are alive at once
FIXED_BYTES = 64 << 20  # workspaces of products and of attention
LOGIT_COPIES = 1.5  # float32 logits, and the product's result in 16 bits
META = torch.device("meta")


def tensor_bytes(roots: Iterable[object]) -> int:
    """Return the bytes of all tensors that the objects hold, including tensors on the meta device."""
    return sum(storage.nbytes() for storage in find_storages(roots, outlined=True).values())


def estimate_step(model: Model, widest: int, layout: CacheLayout, limits: Limits,
                  feature_bytes: Mapping[str, FeatureBytes], *, on_gpu: bool, has_graphs: bool) -> StepMemory:
    """Estimate the memory of a model's steps. widest: see `widest_of`. has_graphs: whether steps are captured."""
    activations = _activation_bytes(model, widest, limits)
    state = RowState(limits, layout.groups, META)
    state_bytes = tensor_bytes([state])
    if on_gpu:
        state_bytes += sum(room.buffers for room in feature_bytes.values())
    graphs = graph_bytes(limits, activations, has_prompts=True) if has_graphs else 0
    return StepMemory(activations, state_bytes, graphs, state.sampling.later_bytes)


def _activation_bytes(model: Model, widest: int, limits: Limits) -> int:
    tokens = sum(largest_step(limits)[0])
    numbers = tokens * (STREAMS * model.hidden_size + widest)
    rows = limits.extent(Axis.LOGIT_ROWS) * limits.vocab_size
    logits = 4 * (LOGIT_COPIES * rows + 2 * min(rows, KERNEL_CHUNK_ELEMENTS))
    hidden = 2 * tokens * model.hidden_size * model.dtype.itemsize
    return FIXED_BYTES + max(numbers * model.dtype.itemsize, hidden + int(logits))


def widest_of(model: Model, modules: Sequence[LayeredModule]) -> int:
    """Return the most elements for each token that one matrix product keeps alive: its inputs, its outputs, and the
    outputs after the activation. modules: the drafter's modules."""
    layers = [layer for module in (model, *modules) for layer in module.layers]
    linears = find_modules(layers, Linear)
    each = [linear.declared.num_inputs + 3 * linear.declared.num_outputs // 2 for linear in linears]
    chosen = max((router.rule.top_k for router in find_modules(layers, Router)), default=1)
    experts = [chosen * _expert_numbers(own.declared) for own in find_modules(layers, Experts)]
    scans = 2 if model.recurrent_layers else 1  # scans hold gates and states of a chunk in float32
    return scans * max([*each, *experts], default=0)


def _expert_numbers(declared: ExpertsDeclaration) -> int:
    """Return the elements that one expert keeps alive for a token row: input, gate and up, activation and output."""
    inner = len(declared.projections[1].inputs)
    return 2 * declared.hidden_size + (2 + declared.is_gated) * inner
