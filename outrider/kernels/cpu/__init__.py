"""Native CPU kernels: C code, compiled on the machine it runs on (`build.py`), behind functions of tensors.

Every function computes the same result as the function of its name in reference.py. `checks.py` tests which arguments
the C code accepts; the table of operations calls these checks before a call, and the functions rely on them. This
package does not depend on models."""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.kernels.cpu.adapters import LayerDeltas, pack_layer_targets
    from outrider.kernels.cpu.attention import (
        Attention,
        Requests,
        RopeWrite,
        make_requests,
        paged_attention,
        rope_write,
    )
    from outrider.kernels.cpu.build import available, is_switched_off, reason
    from outrider.kernels.cpu.layer import BoundLayer, LayerStep, LayerWeights, decoder_layer
    from outrider.kernels.cpu.matrix import FLOATS, HALVES, PACKED, Matrix, dense_matrix, fp8_matrix, linear, product
    from outrider.kernels.cpu.packed import PackedMatrix, PackedRows, pack_blocks, pack_rows, packed_lanes
    from outrider.kernels.cpu.sampling import count_runs, draw_tokens, report_tokens
    from outrider.kernels.cpu.token_rows import (
        add_rms_norm,
        cap_logits,
        find_ngram,
        gelu_scale,
        gelu_tanh_mul,
        rms_norm,
        sigmoid_scale,
        silu_mul,
    )
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "FLOATS",
    "HALVES",
    "PACKED",
    "Attention",
    "BoundLayer",
    "LayerDeltas",
    "LayerStep",
    "LayerWeights",
    "Matrix",
    "PackedMatrix",
    "PackedRows",
    "Requests",
    "RopeWrite",
    "add_rms_norm",
    "available",
    "cap_logits",
    "count_runs",
    "decoder_layer",
    "dense_matrix",
    "fp8_matrix",
    "draw_tokens",
    "find_ngram",
    "gelu_scale",
    "gelu_tanh_mul",
    "is_switched_off",
    "linear",
    "make_requests",
    "pack_blocks",
    "pack_rows",
    "pack_layer_targets",
    "packed_lanes",
    "paged_attention",
    "product",
    "reason",
    "report_tokens",
    "rms_norm",
    "rope_write",
    "sigmoid_scale",
    "silu_mul",
]
