"""Programmatic dependent launch in Gluon: a kernel starts while the previous kernel still runs.
`common.release_dependents` and `common.wait_for_inputs` do this in Triton."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.jit
def release_dependents(PDL: gl.constexpr):
    """Allow the next kernel to start from this point on."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r,~{memory}", [], dtype=gl.int32,
                                  is_pure=False, pack=1)


@gluon.jit
def wait_for_inputs(PDL: gl.constexpr):
    """Wait until everything that earlier kernels have written can be read."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r,~{memory}", [], dtype=gl.int32, is_pure=False,
                                  pack=1)
