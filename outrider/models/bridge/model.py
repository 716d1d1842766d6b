"""BridgedModel: a model that transformers' code computes on the token rows of the engine's steps.

Attention, products, norms, MLPs and experts are layers of this package wherever transformers' modules compute the same.
The rest is transformers' code that calls these layers. For that code the ragged batch is one long sequence."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outrider.formats import RankGroup
from outrider.layers import Linear, Module, NothingAttends, Parameter, StepContext, TiedLinear
from outrider.mixers import WantedRows
from outrider.models.base import Hidden, Model, WantedHidden
from outrider.models.bridge.bridged_attention import CALLED, NAME, StepAttention, register_attention
from outrider.models.bridge.buffers import allocate
from outrider.models.bridge.current_step import CurrentStep
from outrider.models.bridge.hooked_streams import PassingModule, Streams
from outrider.models.bridge.installed import find_class, make_config, positions_of
from outrider.models.bridge.modules import BridgedHead
from outrider.models.bridge.names import CheckpointNames
from outrider.models.bridge.outline import NUM_TOKENS, HostReads, Outline, outline_model
from outrider.models.bridge.refusal import Unservable, words_of
from outrider.models.bridge.replace import Replacements
from outrider.models.config import ConfigReader

log = logging.getLogger("outrider")


class BridgedModel(Model):
    """A model that runs transformers' code. Its modules are named like their tensors in the checkpoint."""

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        """max_len is not used: transformers' code computes rotations from each step's positions, without a table."""
        model_class = find_class(config)
        hf_config, ignored = make_config(config, model_class)
        self.config, self.dtype, self.device = config, dtype, device
        if ignored and device.type == "meta":  # once: an outline is built before every model
            log.warning("%s: transformers' %s does not read %s", config.source, type(hf_config).__name__,
                        ", ".join(ignored))
        self.max_positions = positions_of(config, hf_config)
        register_attention()
        try:
            self._build(model_class, hf_config)
        except Unservable as error:
            raise config.refusal("architectures", "it would run through transformers' code, and the engine cannot run "
                                                  f"that code: {error}") from error

    def _build(self, model_class: type[Any], hf_config: Any) -> None:
        model = _make(model_class, hf_config, self.dtype)
        base = model.base_model
        if base is model:
            raise Unservable("the model's code computes hidden states and logits in one module")
        self._names = CheckpointNames(model)
        self._step, self._streams = CurrentStep(), Streams()
        replacements = Replacements(model, self._step, dtype=self.dtype, device=self.device)
        self._replace_ends(model, hf_config, replacements)
        replacements.replace_known(kept={self._output_name})
        outline = outline_model(model, base)
        self._replace_attention(model, outline, replacements)
        self.hidden_size, self.num_layers = outline.hidden_size, len(outline.calls)
        self._layers, self._layer_names = model.get_submodule(outline.layers), outline.layers
        self._makes_tuples = outline.makes_tuples
        self._streams.watch(self._layers)
        self._parts: list[tuple[str, Module]] = [*replacements.named_parts()]
        model._modules[self._output_name] = BridgedHead(self.lm_head, self._step)
        self._bind_attention(model, outline)
        self._base, self._head, self._states = base, model, _GivenStates()
        model._modules[model.base_model_prefix] = self._states
        self._check_run()
        model._modules[model.base_model_prefix] = base
        self._allocate(model, outline)
        model._modules[model.base_model_prefix] = self._states

    def _check_run(self) -> None:
        """Run the model once on the meta device, after all replacements, as a step does. Refuse code that fails, and
        record whether the code reads values of tensors."""
        tokens = torch.zeros(NUM_TOKENS, dtype=torch.int64, device="meta")
        context = StepContext(NothingAttends(), tokens)
        reads = HostReads()
        try:
            with torch.no_grad(), reads:
                logits = self.logits(self.forward(tokens, context).final, context)
        except Exception as error:  # code of another package, called as the engine calls it
            raise Unservable(f"the model's code cannot be run in parts: {words_of(error)}") from error
        if tuple(logits.shape) != (NUM_TOKENS, self.vocab_size):
            raise Unservable(f"the model's code makes logits of shape {[*logits.shape]} for {NUM_TOKENS} tokens")
        self.reads_device = reads.found

    def _replace_ends(self, model: Any, hf_config: Any, replacements: Replacements) -> None:
        """Replace the embedding and the output projection."""
        by_module = {module: name for name, module in model.named_modules()}
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        if type(output) is not nn.Linear or "." in by_module[output]:
            raise Unservable("the model's output layer is not one linear layer")
        self._output_name = by_module[output]
        self._embedding_name = by_module[embedding]
        self._is_tied = output.weight is embedding.weight
        self.vocab_size = output.out_features
        made = replacements.replace_embedding(self._embedding_name)
        if made is None:
            raise Unservable(f"{self._embedding_name} is an embedding that does more than look up token ids")
        self.embed_tokens = made
        if self._is_tied:
            if output.bias is not None:
                raise Unservable("the model's output layer shares the embedding's weight and also has a bias")
            self.lm_head: Linear = TiedLinear(self.embed_tokens)
        else:
            self.lm_head = Linear(output.in_features, output.out_features, bias=output.bias is not None,
                                  dtype=self.dtype, device=self.device)

    def _replace_attention(self, model: nn.Module, outline: Outline, replacements: Replacements) -> None:
        """Replace each plain attention module by one block of this package. In other attention modules, join the
        matrices that are multiplied with the same tensor."""
        self.attention_layers = []
        done: list[str] = []
        for index, call in enumerate(outline.calls):
            layer = call.layer(index)
            self.attention_layers.append(layer)
            if call.is_plain and replacements.replace_attention(call.name, layer, call.rotary_dim):
                done.append(call.name)
        for names in outline.shared_inputs:
            if names[0].rpartition(".")[0] not in done:
                replacements.join(names)

    def _bind_attention(self, model: nn.Module, outline: Outline) -> None:
        """Make the remaining attention modules call the engine's attention of their layer."""
        for index, call in enumerate(outline.calls):
            attention = StepAttention(index, self.attention_layers[index].head_dim, self._step)
            object.__setattr__(model.get_submodule(call.name), CALLED, attention)

    def _allocate(self, model: nn.Module, outline: Outline) -> None:
        """Allocate the tensors of modules that were not replaced, and give the sinks among them to the engine's
        attention layers."""
        calls = enumerate(outline.calls)
        sinks = {f"{call.name}.{call.sinks}": index for index, call in calls if call.sinks is not None}
        own = allocate(model, {*sinks}, dtype=self.dtype, device=self.device)
        for name, index in sinks.items():
            self.attention_layers[index] = replace(self.attention_layers[index], sinks=own[name])
        self._parts += [(name, Parameter(tensor)) for name, tensor in own.items()]

    def parts(self) -> Sequence[tuple[str, Module]]:
        output = self._embedding_name if self._is_tied else self._output_name
        return [*self._parts, (output, self.lm_head)]

    def shard(self, group: RankGroup) -> None:
        raise ValueError(f"{self.config.source}: tensor_parallel_size={group.count} is not supported with "
                         "model_impl='transformers': use tensor_parallel_size=1, or replicas")

    def set_exact(self, exact: bool) -> None:
        """Refuse exact mode. torch computes the last elements of a tensor by different code than the others, so a token
        row's result may depend on the row's index in the batch."""
        if exact:
            raise ValueError("exact=True is not supported with model_impl='transformers': ropes and activations of "
                             "transformers' own code may have other bits in another batch; leave exact out")

    def slot_name(self, name: str) -> str:
        return self._names.slot_name(name)

    def ignores(self, name: str) -> bool:
        is_tied_output = self._is_tied and name == f"{self._output_name}.weight"
        return super().ignores(name) or is_tied_output or self._names.ignores(name)

    @contextmanager
    def one_layer_each(self) -> Iterator[None]:
        """Context manager: inside it only the first layer of each kind and the last layer run, which is enough to
        compile the kernels of all layers."""
        layers = [*self._layers]
        for index in self._repeated():
            made = PassingModule(layers[index], index + 1, self._streams, makes_tuple=self._makes_tuples)
            self._layers._modules[str(index)] = made
        try:
            yield
        finally:
            for index, layer in enumerate(layers):
                self._layers._modules[str(index)] = layer

    def _repeated(self) -> list[int]:
        """Return the indices of the layers whose attention and weight shapes equal those of an earlier layer, without
        the last layer."""
        shapes: list[list[Any]] = [[replace(layer, index=0)] for layer in self.attention_layers]
        for name, slot in self.weights().items():
            if name.startswith(f"{self._layer_names}."):
                index, _, own = name.removeprefix(f"{self._layer_names}.").partition(".")
                shapes[int(index)].append((own, slot.shape, slot.target.dtype, slot.kind))
        return [index for index, kind in enumerate(shapes[:-1]) if kind in shapes[:index]]

    def forward(
        self, tokens: torch.Tensor, context: StepContext, aux_layers: tuple[int, ...] = (),
        rows: WantedRows | None = None,
    ) -> Hidden:
        assert all(0 <= each <= self.num_layers for each in aux_layers), f"{aux_layers} of {self.num_layers} layers"
        with self._step.of(context), self._streams.kept({*aux_layers, self.num_layers}) as streams:
            made = self._base(input_ids=tokens[None], position_ids=context.rope_positions[None], use_cache=False)
            final, before_norm = made.last_hidden_state[0], streams[self.num_layers]
            seen = tuple(streams[each] for each in aux_layers)
        if rows is None:
            return Hidden(final, before_norm, seen, context)
        wanted = rows.token_rows
        return WantedHidden(final[wanted], before_norm[wanted], seen, context, wanted)

    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Compute logits with transformers' own forward, in which `hidden` replaces the base model's result. So the
        model's own logit scales and limits apply."""
        self._states.states = hidden[None]
        try:
            with self._step.of(context):
                tokens = hidden.new_zeros(1, len(hidden), dtype=torch.int64)
                logits: torch.Tensor = self._head(input_ids=tokens, use_cache=False).logits[0]
        finally:
            self._states.states = None
        return logits.to(torch.float64 if self.dtype == torch.float64 else torch.float32)  # some code has its own idea


def _make(model_class: type[Any], hf_config: Any, dtype: torch.dtype) -> Any:
    """Build transformers' model on the meta device."""
    for key in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(hf_config, key, False):
            setattr(hf_config, key, False)
    try:
        with torch.device("meta"):
            model = model_class._from_config(hf_config, dtype=dtype, attn_implementation=NAME)
    except Exception as error:  # whatever the code of one of some hundred models raises
        raise Unservable(f"{model_class.__name__} cannot be built from this config: {words_of(error)}") from error
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"  # the same within the positions of the config, and no more are served
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it would wait for the ids of every step
            module.warn_if_padding_and_no_attention_mask = _pass
    return model.eval()


def _pass(*_: Any, **__: Any) -> None:
    """Do nothing."""


class _GivenStates(nn.Module):
    """Stands for the base model and its modules while logits are made: it returns the given hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.states: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return self  # some models call a module of the base model, such as its decoder

    def forward(self, *_: Any, **__: Any) -> Any:
        return _States(self.states)


class _States:
    """A base model's output object that has only hidden states."""

    def __init__(self, states: torch.Tensor | None) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None  # caches, attentions, logits of routers
