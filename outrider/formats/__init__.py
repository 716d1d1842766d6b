"""Formats: how the weights of linear layers, embeddings and experts are stored, and every product with them.

A format is one file. It is built empty from a layer's declaration, and only it reads the weight's tensors.

A layer *declares* its weight (`formats/declared.py`): sizes, the matrices of the checkpoint that it consists of
(segments), dtype, device. Nothing is allocated then. The source tells from the files' headers how each matrix is
stored (`ModelSource.stored_format`), by the name that the files have for it (`loader.stored_formats`);
`declare_formats` looks the kind up in the table of formats, and the layer's format is built from the declaration,
empty, when it is first asked for. Only what the format stores is allocated:

    Linear(in, out) --declares--> LinearDeclaration --+--> LinearFormat (dense, GGUF bits, codes with scales, yours)
    stored_format("model.layers.0.mlp.up_proj") ------+        |
                                                          slots by the checkpoint's tensor names
    source.read() --> StoredWeight: bits with scales ------> copied into the slots, or dequantised into a dense one

If no format is registered for the kind, or it does not serve the dtype, the device or the mix of segments, the layer
is dense and the stored weight is dequantised while it is loaded, tensor by tensor. Every tensor must find its slot
and every slot its tensor. One line of the log says what is kept in which form and what was expanded (`weights: 4096
MiB in fp8 rows, 512 MiB in bfloat16; expanded to bfloat16: 12 of IQ2_XS`); `outrider env MODEL` shows its first half.

Quantised safetensors files (fp8, compressed-tensors, GPTQ, AWQ, ModelOpt) have one form in memory,
`kernels.scaled.Scaled`: codes of 8 or 4 bits, a scale for every group of neighbouring inputs of an output, perhaps
zero points. A `Quantization` reads a `quantization_config` strictly and brings its files' tensors into this form,
matrix by matrix (`models/sources/scaled_weights.py`); scales of a whole matrix or of blocks are spread over the
outputs, so that matrices with different scales can lie in one weight. `ScaledLinear` and `ScaledExperts` keep the
form; `ops.scaled_linear` and `ops.scaled_experts` multiply with it. `prepare` lets `ops.arrange_codes` put the codes
in place into the order in which the device's products read them (tiles of int4 and int8 on Hopper cards);
`restore_order` undoes that before weights are updated. A norm rounds its result for the products that read it, if
these are all that do (`RMSNorm.round_for`): the codes stay with the tensor (`kernels/gpu/rounding.py`), and a
launch is saved. On a GPU fp8 weights are multiplied with token rows rounded to fp8 where the files ask for it, by a
scale of each token row, never of a batch; elsewhere token rows are not rounded, nor in linear layers of fewer than
2^22 numbers, where that costs quality and gains no time. Many token rows are multiplied as bf16 numbers of the same
codes, so that the number of rows changes a result only by the rounding of these numbers and by the order of
additions; exact mode has one kernel for all. Tensor cores of Hopper cards add fp8 products with fewer bits than
float32 has, so kernels add up their sums in float32 after every 128 inputs. With `quantization="fp8"` or `"int4"`
linear layers and experts of unquantised files are brought into the form when their tensors are read
(`WeightSlot.quantize`), so the numbers of one matrix at most are in memory, and loading takes less than the file's
numbers. Fp8 has a scale for every output. Int4 has a bfloat16 scale for every 128 inputs (64 or 32 where 128 do not
divide them); linear layers of fewer than 2^24 numbers have one for every 32, with an offset, and those of fewer than
2^20 are int8 with a scale for every 32, since their bytes count little and small models are sensitive. Experts are
many, whatever their size. No text is needed: each group tries several ranges and fits scale and offset to the codes
by least squares (`kernels.scaled.to_int4_groups`). Heads that are tied to the embedding stay numbers.

On a CPU a float32 model multiplies with codes by native code (`kernels/scaled_on_host.py`). Fp8 is read where it
lies, with the bits of a product with its numbers in float32: one token row takes about as long, in a quarter of the
memory. Integers and 4-bit floats in groups of whole blocks of 32 inputs are copied into the packed forms of GGUF's
kinds, with zero points too, and obey `activation_bits`; 4-bit floats in groups of 16 are copied as fp8 (no copies
with `packed_weights=False`). Experts likewise, one product for each. All other codes become float32 numbers anew in
every product, which saves memory and costs time. `keep_quantized=False` reads such files as numbers.

A float32 model on a CPU keeps GGUF's blocks in a packed form of their own (`GgufLinear`, `GgufExperts`). A bfloat16
model on a GPU brings them into the form of codes with scales while they are read (`WeightSlot.recode`,
`kernels/gguf_codes.py`): Q4_0, Q4_1, Q4_K, Q3_K and Q2_K as int4, MXFP4 as 4-bit floats, all others as int8, with a
bfloat16 scale, and an offset where a kind has least values, for every 32 or 16 inputs. So Q4_K takes 5 bits of a
weight where the file has 4.5, and Q6_K 9 where it has 6.6. A layer whose matrices are of several kinds (queries and
keys in Q4_K, values in Q6_K) is a `StackedLinear`. Input features in another order than the model's (Qwen3.5) are
expanded on a GPU.

A slot knows the shape of the checkpoint's tensor and the part of it that this rank holds (`TensorShard`). A linear
layer is sharded by output features, each segment by itself (`OutputShard`), or by input features (`InputShard`), with
the function that sums over ranks: it follows the product and precedes bias and residual stream (`formats/summed.py`).
Sizes of the model and of a rank are two types (`ModelSize`, `RankSize`).

Several ranks hold a model together after `Model.shard(group)`, a walk over its modules before formats are declared and
weights allocated. A block with heads or inner features overrides `Module.shard` and says how it is sharded; whatever
does not is held whole by every rank. `RankGroup` (`formats/ranks.py`) sums and gathers with the same bits on every
rank.

- attention: its q heads with gates, and the kv heads that they read (one that several ranks share, if there are fewer
  than ranks); their keys and values in the cache; norms of heads, output bias; one sum
- latent attention: its heads of the query and key/value expansions; compressions, norms, indexer, the cache of
  latents and index keys; one sum
- attention to chosen blocks of tokens: as attention; indexer, index keys; one sum
- n-gram embeddings: some numbers of every row of the table; projections, norms, the convolution and its state; a
  gather of the found numbers
- MLP, experts: a part of the inner features, of every expert too; router, gate of the shared expert, projections
  around experts, output bias; one sum for experts and shared expert together
- Mamba-2: its heads in every segment of the projection and the convolution, with the groups that they read; their
  states; output bias; one sum; if a group of the norm lies on several ranks, a gather of one number a token before it
- gated delta: its key heads with their value heads in every segment; their states; the norm of a head; one sum
- embedding, per-layer table, head: the rows of some tokens; the last rank fewer, if the vocabulary does not divide; a
  sum; a gather of logits
- norms of the residual stream, gates of several streams, rope tables, per-layer gates (Gemma 4), class heads: all
- EAGLE heads, MTP modules, Gemma 4 assistants, draft models: their blocks as those of the target; projections in
  front of the layers; an embedding or output of a head's own; hidden states in pages; a draft model whose sizes do
  not divide; as their blocks

`check_ranks` (`layers/base.py`) refuses sizes that do not divide, by the key of the config and with the numbers of
ranks that would do. Weights in groups of inputs that a rank would split (`formats/registry.py`) are refused as well.
The buffers of a group on GPUs stay where they are while weights sleep.
"""

import warnings
from typing import Any

from outrider.formats.declared import (
    ExpertsDeclaration,
    InputShard,
    LinearDeclaration,
    ModelSize,
    OutputShard,
    PackedPart,
    Ranks,
    RankSize,
    StoredFormat,
    StoredTensor,
    VocabularyShard,
)
from outrider.formats.dense import DenseLinear
from outrider.formats.expansion import DenseExpansion, ExpansionDeclaration, ExpansionFormat
from outrider.formats.experts import DenseExperts, ExpertsFormat
from outrider.formats.gguf import TransposedHeads
from outrider.formats.linear_format import EmbeddingFormat, LinearFormat, NativeProduct, activate
from outrider.formats.ranks import RankGroup, UnsummedRanks
from outrider.formats.registry import FormatChoice, register_format
from outrider.formats.slots import HeadLayout, PairedHeads, StoredWeight, TensorShard, WeightSlot, join_names
from outrider.formats.summed import build_format
from outrider.formats.weight_format import WeightFormat

__all__ = [
    "DenseExpansion",
    "DenseExperts",
    "DenseLinear",
    "EmbeddingFormat",
    "ExpansionDeclaration",
    "ExpansionFormat",
    "ExpertsDeclaration",
    "ExpertsFormat",
    "FormatChoice",
    "HeadLayout",
    "InputShard",
    "LinearDeclaration",
    "LinearFormat",
    "ModelSize",
    "NativeProduct",
    "OutputShard",
    "PackedPart",
    "PairedHeads",
    "RankGroup",
    "RankSize",
    "Ranks",
    "StoredFormat",
    "StoredTensor",
    "StoredWeight",
    "TensorShard",
    "TransposedHeads",
    "UnsummedRanks",
    "VocabularyShard",
    "WeightFormat",
    "WeightSlot",
    "activate",
    "build_format",
    "join_names",
    "register_format",
]

_RENAMED = {"OutputCut": "OutputShard", "InputCut": "InputShard"}  # since version 0.1


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is called {_RENAMED[name]} now", FutureWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
