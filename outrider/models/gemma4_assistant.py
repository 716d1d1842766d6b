"""The Gemma 4 assistant: a small decoder of queries only, which reads the keys and values of a target's last layers.

It has no cache, does not run over the prompt, and guesses any number of tokens from one position. Its drafter gives it
positions and lengths; the assistant does not depend on pages, rows or drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from outrider.cache.groups import LayerCache
from outrider.kernels import ops
from outrider.layers import Delta, Embedding, Linear, Module, RMSNorm, StepContext
from outrider.mixers import WantedRows
from outrider.models.base import Hidden, Model
from outrider.models.config import ConfigReader
from outrider.models.gemma4 import Gemma4, Gemma4Layer, read_rotaries
from outrider.models.gemma4_config import LayerShape, read_shapes, read_sizes
from outrider.models.head import SlotHead
from outrider.models.sources.model_source import WeightError

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
TOKEN_ORDERING = "masked_embedding.token_ordering"


class CentroidHead:
    """An output layer that computes logits only for the tokens of the few centroids that fit a hidden state best. All
    other logits are -inf."""

    def __init__(self, embedding: torch.Tensor, num_centroids: int, num_chosen: int) -> None:
        vocab_size, hidden_size = embedding.shape
        self.embedding, self.num_chosen = embedding, num_chosen
        options = {"dtype": embedding.dtype, "device": embedding.device}
        self.centroids = Linear(hidden_size, num_centroids, bias=False, **options)
        # [centroids, tokens of each]; a checkpoint brings its own
        self.members = torch.arange(vocab_size, device=embedding.device).view(num_centroids, -1)

    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return the logits [n, vocabulary] of hidden [n, hidden]."""
        nearest = self.centroids.wide(hidden, context).topk(self.num_chosen, dim=-1).indices
        ids = self.members[nearest].flatten(1)  # [n, tokens]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        scores = torch.bmm(self.embedding[ids], hidden[:, :, None]).squeeze(2).to(wide)
        logits = scores.new_full((hidden.shape[0], self.embedding.shape[0]), -torch.inf)
        return logits.scatter_(1, ids, scores)


class Gemma4Assistant(SlotHead):
    """Model class for Gemma4AssistantForCausalLM and Gemma4UnifiedAssistantForCausalLM, for one target."""

    target: Gemma4

    def __init__(self, config: ConfigReader, target: Gemma4, *, first_layer: int, max_len: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        text = config.text_section()
        self.sizes = sizes = read_sizes(text)
        check_fits(config, text, target)
        super().__init__(target, target.hidden_size, dtype=dtype, device=device)
        self.shapes = [_reading(text, target, shape) for shape in read_shapes(text, sizes, first_layer)]
        self.attention_layers = [shape.attention for shape in self.shapes]
        self.rotaries = read_rotaries(text, self.shapes, max_len=max_len, dtype=dtype, device=device)
        bias = text.get("attention_bias", bool, False)
        self.layers = [Gemma4Layer(s, sizes, attention_bias=bias, dtype=dtype, device=device) for s in self.shapes]
        self.norm = RMSNorm(sizes.hidden_size, sizes.eps, dtype=dtype, device=device)
        self.pre = Linear(2 * target.hidden_size, sizes.hidden_size, bias=False, dtype=dtype, device=device)
        self.post = Linear(sizes.hidden_size, target.hidden_size, bias=False, dtype=dtype, device=device)
        # Tokens come in by the target's embedding; its own is its output.
        self.output = Embedding(sizes.vocab_size, sizes.hidden_size, dtype=dtype, device=device)
        self.lm_head = Linear.from_weight(self.output.weight)
        self.centroids = _centroids(config, self.output.weight)

    def parts(self) -> Sequence[tuple[str, Module]]:
        centroids = [] if self.centroids is None else [("masked_embedding.centroids", self.centroids.centroids)]
        return [
            ("model.embed_tokens", self.output),
            ("model.norm", self.norm),
            ("pre_projection", self.pre),
            ("post_projection", self.post),
            *((f"model.layers.{index}", layer) for index, layer in enumerate(self.layers)),
            *centroids,
            ("model.embed_tokens", self.lm_head),
        ]

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name == "lm_head.weight"  # tied

    def arrivals(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        has_order = False
        for name, tensor in tensors:
            if name == TOKEN_ORDERING and self.centroids is not None:
                self.centroids.members = _ordered(tensor, self.centroids.members)
                has_order = True
            else:
                yield name, tensor
        if self.centroids is not None and not has_order:
            raise WeightError(f"the files hold no tensor {TOKEN_ORDERING}, which use_ordered_embeddings=true needs; "
                              "fetch the whole checkpoint again")

    def consume(self, hidden: Hidden) -> torch.Tensor:
        return hidden.final

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, context: StepContext,
                rows: WantedRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the hidden states of drafts. tokens [n]: the last tokens, whose queries stand at the context's
        positions; hidden: [n, target's hidden]. `rows` must be None: the assistant writes no cache, so every row that
        it runs is needed."""
        assert rows is None
        angles = [rotary.at(context.rope_positions) for rotary in self.rotaries]
        ids, table, scale = self._table(tokens, self.embedding.scale, context)
        joined, _ = ops.join_embedding(ids, table, hidden, scale=scale)
        residual = self.pre(joined, context)
        delta: Delta = None
        for layer in self.layers:
            delta, residual = layer(delta, residual, angles[layer.rotary], context)
        final, _ = self.norm.add_norm(delta, residual)
        return final, self.post(final, context)

    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        if self.centroids is None:
            logits = self.lm_head.wide(hidden, context)
        else:
            logits = self.centroids.logits(hidden, context)
        return self.target.without_suppressed(logits)  # the target never picks suppressed tokens

    def cache_layers(self) -> list[LayerCache]:
        return [LayerCache(layer.index, layer.cache_spec(self.dtype.itemsize), shape.reads)
                for layer, shape in zip(self.attention_layers, self.shapes, strict=True)]


def build_assistant(config: ConfigReader, target: Model, *, first_layer: int, max_len: int, dtype: torch.dtype,
                    device: torch.device) -> Gemma4Assistant:
    """Build an assistant without its weights."""
    config.must_equal("model_type", *MODEL_TYPES)
    if not isinstance(target, Gemma4):
        raise ValueError(f"{config.source}: a Gemma 4 assistant reads the cache of a Gemma 4 model, and the target is "
                         f"a {type(target).__name__}: use another drafter with this target, or leave "
                         "speculative_config out")
    made = Gemma4Assistant(config, target, first_layer=first_layer, max_len=max_len, dtype=dtype, device=device)
    config.refuse_unread()
    return made


def check_fits(config: ConfigReader, text: ConfigReader, target: Gemma4) -> None:
    """Refuse an assistant that was made for another target."""
    config.must_equal("backbone_hidden_size", target.hidden_size)
    config.must_equal("tie_word_embeddings", True, default=True)
    text.must_equal("vocab_size", target.vocab_size)
    text.must_equal("hidden_size_per_layer_input", 0, default=0)
    # There are no inputs for each layer and no experts, and the target says which tokens are suppressed.
    text.passes_over("vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size")
    config.passes_over("suppress_tokens")
    text.passes_over("final_logit_softcapping")
    text.must_equal("enable_moe_block", False, default=False)
    text.must_equal("use_double_wide_mlp", False, default=False)
    text.must_equal("num_kv_shared_layers", text.required("num_hidden_layers", int), 0, default=0)


def _reading(text: ConfigReader, target: Gemma4, shape: LayerShape) -> LayerShape:
    """Return the layer's shape, changed to read the cache of the target's last layer of the same kind. Both layers must
    have the same heads and window."""
    owner = target.owner(shape.kind)
    if owner is None:
        raise text.refusal("layer_types", f"the target has no {shape.kind} layer whose cache this one could read",
                           "Use the assistant that was made for this target.")
    own, theirs = shape.attention, owner.attention
    if (own.num_kv_heads, own.head_dim, own.window) != (theirs.num_kv_heads, theirs.head_dim, theirs.window):
        raise ValueError(
            f"{text.source}: {shape.kind} layers have {own.num_kv_heads} KV heads of {own.head_dim} and a window of "
            f"{own.window}; the target's layer {theirs.index} has {theirs.num_kv_heads} of {theirs.head_dim} and "
            f"{theirs.window}: use the assistant that was made for this target"
        )
    return replace(shape, attention=replace(own, writes=False), reads=theirs.index)


def _centroids(config: ConfigReader, embedding: torch.Tensor) -> CentroidHead | None:
    if not config.get("use_ordered_embeddings", bool, False):
        config.passes_over("num_centroids", "centroid_intermediate_top_k")
        return None
    count, chosen = config.get("num_centroids", int, 2048), config.get("centroid_intermediate_top_k", int, 32)
    if count < 1 or embedding.shape[0] % count:
        raise config.refusal("num_centroids", f"it must divide the vocabulary ({embedding.shape[0]})")
    if not 1 <= chosen <= count:
        raise config.refusal("centroid_intermediate_top_k", f"it must be from 1 to num_centroids ({count})")
    return CentroidHead(embedding, count, chosen)


def _ordered(order: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """Check a checkpoint's token ordering, and return it in the shape of `members`: the token ids of each centroid."""
    flat = order.to(device=members.device, dtype=torch.int64).flatten()
    if not torch.equal(flat.sort().values, torch.arange(members.numel(), device=members.device)):
        raise WeightError(f"tensor {TOKEN_ORDERING} must hold each token id from 0 to {members.numel() - 1} exactly "
                          "once; fetch the file again")
    return flat.view_as(members)
