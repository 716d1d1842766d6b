"""Formats: how the weights of linear layers, embeddings and experts are stored, and every product with them.

A format is one file. Only the format reads its weight tensors; layers ask it for products.

From declaration to weight:

1. A layer *declares* its weight (`formats/declared.py`): sizes, dtype, device, and its *segments*, the matrices of the
  checkpoint that it consists of. Nothing is allocated yet.
2. The source reads from the files' headers how each matrix is stored (`ModelSource.stored_format`).
3. `declare_formats` looks this kind up in the table of formats. The layer builds its format, empty, when the format is
  first asked for.
4. The loader copies stored weights into the format's slots.

    Linear(in, out) --declares--> LinearDeclaration --+--> LinearFormat (dense, GGUF bits, codes with scales, yours)
    stored_format("model.layers.0.mlp.up_proj") ------+        |
                                                          slots by the checkpoint's tensor names
    source.read() --> StoredWeight: bits with scales ------> copied into the slots, or dequantised into a dense one

A layer is dense if no format is registered for the kind, or if the format does not serve the dtype, the device or the
mix of segments. Its stored weight is then dequantised tensor by tensor while it is loaded. Every tensor must fit a
slot, and every slot must get a tensor. One log line says in which forms weights are kept and what was dequantised;
`outrider env MODEL` shows the first half of this line.

Codes with scales (`ScaledLinear`, `ScaledExperts`):

- All quantised safetensors files (fp8, compressed-tensors, GPTQ, AWQ, ModelOpt) have one form in memory,
  `kernels.scaled.Scaled`: codes of 8 or 4 bits, a scale for every group of neighbouring inputs of an output, perhaps
  zero points. A `Quantization` reads a `quantization_config` strictly and converts the tensors
  (`models/sources/scaled_weights.py`).
- A scale of a whole matrix or of a block is repeated for every output, so that matrices with different scales can be
  one weight.
- `prepare` reorders the codes in place for the device's products (`ops.arrange_codes`); `restore_order` undoes this
  before weights are updated.
- On a GPU, fp8 products round token rows to fp8 where the files ask for it, with one scale for each token row. Layers
  below 2^22 numbers do not round, because that costs quality and gains no time. The norm before a product does the
  rounding if nothing else reads its result (`RMSNorm.round_for`).
- Hopper's tensor cores add fp8 products with fewer bits than float32 has, so kernels add up in float32 after every 128
  inputs. Many token rows are multiplied as bf16 numbers of the same codes; exact mode has one kernel for any number.
- `quantization="fp8"` or `"int4"` codes unquantised linear layers and experts while they are read
  (`WeightSlot.quantize`), one matrix at a time. Fp8 has a scale for every output. Int4 has a bfloat16 scale for every
  128 inputs (64 or 32 where 128 do not divide them). Linear layers below 2^24 numbers have a scale and an offset for
  every 32 inputs, and those below 2^20 are int8. Scales and offsets are fitted by least squares, without a calibration
  text (`kernels.scaled.to_int4_groups`). A head that is tied to the embedding is not coded.

On a CPU (float32 models):

- Native code multiplies with codes (`kernels/scaled_on_host.py`). Fp8 codes are read without a copy. Integers and 4-bit
  floats in groups of 32 inputs are copied into the packed forms of GGUF's kinds and obey `activation_bits`; 4-bit
  floats in groups of 16 are copied as fp8. With `packed_weights=False` there are no copies. All other codes are
  dequantised to float32 in every product.
- GGUF's blocks are packed in another order (`GgufLinear`, `GgufExperts`).
- `keep_quantized=False` dequantises the weights of all files.

On a GPU, GGUF's blocks become codes with scales while they are read (`WeightSlot.recode`, `kernels/gguf_codes.py`):
Q4_0, Q4_1, Q4_K, Q3_K and Q2_K as int4, MXFP4 as 4-bit floats, all others as int8. A layer with matrices of several
kinds is a `StackedLinear`. Matrices with input features in another order than the model's (Qwen3.5) are expanded.

Ranks. `Model.shard(group)` visits all modules before formats are declared and weights allocated. A block with heads or
inner features overrides `Module.shard`; every other module is held whole by every rank. A linear layer is sharded by
output features, each segment separately (`OutputShard`), or by input features (`InputShard`), with a sum over ranks
after the product and before bias and residual stream (`formats/summed.py`). A slot knows the checkpoint's shape and the
part that this rank holds (`TensorShard`). `RankGroup` (`formats/ranks.py`) sums and gathers with the same bits on every
rank.

| block | a rank holds | every rank holds | exchange |
|---|---|---|---|
| attention | its q heads and gates, the kv heads that they read, their cache | head norms, output bias | a sum |
| latent attention | its heads of both expansions | compressions, norms, indexer, cache | a sum |
| attention to chosen blocks | as attention | indexer, index keys | a sum |
| n-gram embeddings | some numbers of every table row | projections, norms, convolution | a gather |
| MLP, experts | some inner features (of every expert) | router, shared gate, output bias | a sum |
| Mamba-2 | its heads with their groups and states | output bias | a sum; a gather if a norm's group spans ranks |
| gated delta | its key heads with value heads and states | the head norm | a sum |
| embedding, head | the rows of some tokens | | a sum; a gather of logits |
| draft heads, draft models | as the target's blocks | projections, hidden states in pages | as the blocks |

Everything else (norms of the residual stream, rope tables, class heads, a draft model whose sizes do not divide) is
held whole. `check_ranks` (`layers/base.py`) refuses sizes that do not divide, and names the config key and the numbers
of ranks that would work.
"""

import warnings
from typing import TYPE_CHECKING, Any

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
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
    from outrider.formats.registry import FormatChoice, build_format, register_format
    from outrider.formats.slots import HeadLayout, PairedHeads, StoredWeight, TensorShard, WeightSlot, join_names
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
_export = lazy_exports(__name__)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"{__name__}.{name} is called {_RENAMED[name]} now: rename it", FutureWarning, stacklevel=2)
    return _export(_RENAMED.get(name, name))
