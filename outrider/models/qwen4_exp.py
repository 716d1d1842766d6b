"""Qwen4-Exp (Qwen3.8-Flash-Next): gated delta layers, every fourth a layer that attends to chosen blocks of its
context; several residual streams; experts beside a gated shared expert; embeddings of hashed n-grams in some layers.

Only text is served: from a checkpoint with a vision tower only the language model is read. A layer with n-gram
embeddings keeps the state of its recurrence and the last inputs of a convolution. The convolution has a separate layer
index, after those of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.kernels.token_blocks import TokenBlocks
from outrider.layers import (
    DecoderLayer,
    GatedDelta,
    StepContext,
    StreamEnd,
    StreamGate,
    StreamLayer,
    TokenMixer,
)
from outrider.layers.indexed_attention import IndexedAttention
from outrider.layers.ngram_embedding import NgramEmbedding, NgramShape
from outrider.mixers import BlockChoice, IndexedLayer
from outrider.models.base import DecoderNames
from outrider.models.config import FULL, ConfigReader, Sizes, refuse_unsupported
from outrider.models.hybrid import LINEAR, HybridDecoder, partial_rope, pass_over_components
from outrider.models.qwen3_next import make_experts, read_kinds, read_shape
from outrider.models.sources.model_source import WeightError

INDEXED = "indexed_attention"
# Hashes of n-grams, in files beside the tables. They follow from the config, as they do for the models' makers.
MULTIPLIERS, PRIMES, OFFSETS = DERIVED = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


class Qwen4Exp(HybridDecoder):
    """Model class for Qwen4ExpForCausalLM, and for the language model of the ConditionalGeneration architecture."""

    names = DecoderNames(norm="model.hyper_connection_mixer")
    norm: StreamEnd  # type: ignore[assignment]

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        if config.has("text_config"):
            below = "model.language_model"
            self.names = DecoderNames.below(below)._replace(norm=f"{below}.hyper_connection_mixer")
            text = config.section("text_config")
            tied = config.get("tie_word_embeddings", bool, text.get("tie_word_embeddings", bool, False))
            config = text.with_values({"tie_word_embeddings": tied})
        refuse_unsupported(config)
        pass_over_components(config)
        config.must_equal("attention_bias", False, default=False)  # products with the indexer's, which has none
        config.must_equal("attn_output_gate", True, default=True)
        config.must_equal("decoder_sparse_step", 1, default=1)  # all layers have experts
        config.must_equal("mlp_only_layers", [], default=[])
        config.passes_over("number_of_conv_states", "intermediate_size")  # the layers say the first
        config = config.with_values({"intermediate_size": 0})
        sizes = Sizes.read(config, head_dim=256)
        self.num_streams = config.get("hc_count", int, 4, least=2)
        self.stream_rank = config.get("hc_lowrank", int, 320, least=1)
        super().__init__(config, sizes, dtype=dtype, device=device)
        rope = partial_rope(config, sizes.head_dim, 1.0)
        self.rotaries = [self.make_rotary(rope, max_len)]
        self.choice = read_choice(config, rope.rotary_dim)
        kinds = read_kinds(_with_full_layers(config))
        config.passes_over("output_gate_type")  # of gated delta layers, which may be missing
        self.attention_layers = [self.indexed_layer(index) for index, kind in enumerate(kinds) if kind == FULL]
        mixers = [self._delta(index) if kind == LINEAR else self._attention(index) for index, kind in enumerate(kinds)]
        self.ngrams = self._ngram_embeddings(kinds)
        self.ngram_order = config.get("ngram_size", int, 3, least=2)
        self.reads_history = bool(self.ngrams)
        self.recurrent_layers = {m.index: m.mixer for m in mixers if isinstance(m, GatedDelta)} | {
            ngram.index: ngram.mixer for ngram in self.ngrams.values()}
        self.layers = [self._layer(mixer, index, self.ngrams.get(index)) for index, mixer in enumerate(mixers)]

    def make_norm(self) -> StreamEnd:  # type: ignore[override]
        return StreamEnd(*self._stream_sizes(), dtype=self.dtype, device=self.device)

    def _stream_sizes(self) -> tuple[int, int, int, float]:
        return self.sizes.hidden_size, self.num_streams, self.stream_rank, self.sizes.eps

    def indexed_layer(self, index: int, anchor: int = 0) -> IndexedLayer:
        """Return an attention layer with an indexer. anchor: the position at which the first block begins."""
        heads, size = self.choice, self.choice.blocks.size
        sizes, choice = self.sizes, BlockChoice(heads.num_heads, heads.head_dim, heads.top_k, TokenBlocks(size, anchor))
        return IndexedLayer(index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.head_dim**-0.5,
                            choice=choice)

    def predicting_layer(self, index: int) -> tuple[DecoderLayer, IndexedLayer]:
        """Return the layer of a prediction module. The module's first token has position 1, so its blocks begin
        there."""
        attention = self.indexed_layer(index, anchor=1)
        mixer = IndexedAttention(attention, self.hidden_size, self.sizes.eps, dtype=self.dtype, device=self.device)
        return self._layer(mixer, index, None), attention

    def _layer(self, mixer: TokenMixer, index: int, ngram: NgramEmbedding | None) -> StreamLayer:
        gates = [StreamGate(*self._stream_sizes(), writes=True, dtype=self.dtype, device=self.device) for _ in range(2)]
        name = "linear_attn" if isinstance(mixer, GatedDelta) else "self_attn"
        return StreamLayer(gates[0], mixer, gates[1], make_experts(self, index), mixer_name=name, early=ngram)

    def _attention(self, index: int) -> IndexedAttention:
        return IndexedAttention(self.indexed_layer(index), self.hidden_size, self.sizes.eps, dtype=self.dtype,
                                device=self.device)

    def _delta(self, index: int) -> GatedDelta:
        gate = self.config.must_equal("output_gate_type", "silu", "swish", "sigmoid", default="silu")
        return GatedDelta(index, self.hidden_size, read_shape(self.config), self.sizes.eps, is_interleaved=False,
                          dtype=self.dtype, device=self.device, gate="silu" if gate == "swish" else gate)

    def _ngram_embeddings(self, kinds: Sequence[str]) -> dict[int, NgramEmbedding]:
        """Return the n-gram embeddings, by the layers that have them. Config and files count layers from 1 on."""
        config = self.config
        numbers = sorted(set(config.get("ple_layer_ids", list[int], [])))
        bad = [number for number in numbers if not 1 <= number <= self.num_layers or kinds[number - 1] != LINEAR]
        if bad:
            raise config.refusal("ple_layer_ids", f"its entries must be numbers of {LINEAR} layers, counted from 1, "
                                                  f"and {bad[0]} is not one")
        order = config.get("ngram_size", int, 3, least=2)
        per_order = config.get("heads_per_ngram", int, 8, least=1)
        width = config.get("ple_embed_dim", int, self.hidden_size, least=1)
        if numbers and width % ((order - 1) * per_order):
            raise config.refusal("ple_embed_dim", f"it must be a multiple of {(order - 1) * per_order}, which is "
                                                  "(ngram_size - 1) * heads_per_ngram")
        rest: dict[str, Any] = {
            "order": order, "heads_per_order": per_order, "vocab_size": self.vocab_size,
            "vector_size": width // ((order - 1) * per_order),
            "least_rows": config.get("ngram_vocab_size_base", int, 20_000_000, least=1),
            "multiple": config.get("make_ngram_vocab_size_divisible_by", int, 128, least=1),
            "seed": config.get("seed", int, 1234),
        }
        taps = config.get("ple_conv_kernel_size", int, 4, least=1)
        num_shards = config.get("split_ngram_parts", int, 512, least=1)
        made = {}
        for at, number in enumerate(numbers):
            shape = NgramShape.make(at, end_id=read_end_id(config), **rest)
            made[number - 1] = NgramEmbedding(
                self.num_layers + at, shape, num_shards, self.hidden_size, self.num_streams, taps, self.sizes.eps,
                dtype=self.dtype, device=self.device)
        return made

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith("model.visual.") or name.endswith(DERIVED)

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        """Raise WeightError if the files contain other hash parameters for n-grams than those that follow from the
        config."""
        prefix, _, part = name.rpartition(".ple.ple_embedding.")
        index = prefix.removeprefix(f"{self.names.layers}.")
        if part not in DERIVED or not index.isdecimal() or int(index) not in self.ngrams:
            return
        shape = self.ngrams[int(index)].table.shape
        wanted = {MULTIPLIERS: shape.multipliers, PRIMES: shape.primes, OFFSETS: shape.offsets}[part]
        if tensor.tolist() != list(wanted):
            raise WeightError(f"tensor {name} does not hold the values that follow from the config (seed, vocab_size, "
                              f"ngram_size, heads_per_ngram, ngram_vocab_size_base): {list(wanted)}. Fetch the files "
                              "again")

    # Streams

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.repeat(1, self.num_streams)

    def aux_state(self, delta: Any, residual: torch.Tensor) -> torch.Tensor:
        """Return the auxiliary state: the mean of the streams."""
        streams = residual if delta is None else delta.added_to(residual)
        return streams.unflatten(1, (self.num_streams, -1)).mean(dim=1)

    def end(self, delta: Any, residual: torch.Tensor, context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm.end(delta, residual, context)

    def layer_inputs(self, tokens: torch.Tensor, embedded: torch.Tensor,
                     context: StepContext) -> Sequence[tuple[torch.Tensor, ...]]:
        """Return, for layers with n-gram embeddings, the id of each token and the ids before it."""
        if not self.reads_history:
            return super().layer_inputs(tokens, embedded, context)
        assert context.history is not None, "n-gram embeddings need the history of the token rows"
        ids = context.history.with_before(tokens, context.positions, self.ngram_order - 1)
        return [(ids,) if isinstance(layer, StreamLayer) and layer.early is not None else () for layer in self.layers]


def read_choice(config: ConfigReader, rotary_dim: int) -> BlockChoice:
    """Read how the indexer chooses blocks. The config's budget is a number of tokens, which must be whole blocks."""
    config.must_equal("indexer_kv_heads", 1)
    size, budget = config.required("indexer_compress_ratio", int), config.required("indexer_budget", int)
    dim = config.required("indexer_head_dim", int)
    if size & (size - 1):
        raise config.refusal("indexer_compress_ratio", "it must be a power of two")
    if budget % size:
        raise config.refusal("indexer_budget", "it must be a multiple of indexer_compress_ratio")
    if dim < rotary_dim:
        raise config.refusal("indexer_head_dim", f"it must be at least {rotary_dim}, the number of dimensions that "
                                                 "rotate")
    return BlockChoice(config.required("indexer_n_heads", int), dim, budget // size, TokenBlocks(size, 0))


def read_end_id(config: ConfigReader) -> int:
    """Read the id at which n-grams end: the first of the ids that end a text."""
    given = config.raw("eos_token_id")
    first = given[0] if isinstance(given, list) and given else given
    if not isinstance(first, int) or isinstance(first, bool):
        raise config.refusal("eos_token_id", "it must be a token id, because n-gram embeddings begin anew after it")
    return first


def _with_full_layers(config: ConfigReader) -> ConfigReader:
    """Return the config with a single name for the layers that attend. Files use two names for them."""
    kinds = config.raw("layer_types")
    if not isinstance(kinds, list):
        return config
    return config.with_values({"layer_types": [FULL if kind == INDEXED else kind for kind in kinds]})
