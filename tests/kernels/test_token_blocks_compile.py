"""The kernels of residual streams and of attention to chosen blocks, at sizes of Qwen4-Exp, compile for an H200
that is not there: the interpreter takes what the compiler may refuse. This file runs as a program, in which Triton does
not interpret."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from tests.kernels.compiled import compiling, found_without_interpreter

HIDDEN, STREAMS, RANK, HEADS, KV, DIM, INDEX_DIM, PAGE, TOKENS = 2048, 4, 320, 16, 2, 256, 128, 16, 8


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_every_kernel() -> None:
    found = set(found_without_interpreter(__file__))
    assert found == {"_join_kernel", "_gates_kernel", "_mix_kernel", "_write_kernel", "_attention_kernel",
                     "_merge_kernel", "_read_kernel"}


def compile_kernels() -> list[str]:
    from outrider.kernels.gpu.elements.hyper_streams import read_streams, write_streams
    from outrider.kernels.gpu.elements.streams import join_streams, mix_streams, stream_gates
    from outrider.kernels.gpu.index.token_blocks import block_attention, write_block_keys
    from outrider.kernels.latent import TokenContexts
    from outrider.kernels.latent_inputs import RopeRows
    from outrider.kernels.streams import StreamRule
    from outrider.kernels.token_blocks import TokenBlocks

    ints, width = torch.zeros(TOKENS, dtype=torch.int64), STREAMS * HIDDEN
    contexts = TokenContexts(torch.zeros(2, 512, dtype=torch.int32), ints, ints, ints)
    with compiling() as found:
        for dtype in (torch.bfloat16, torch.float32):
            def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.zeros(*shape, dtype=dtype)

            streams, gain = made(TOKENS, width), torch.zeros(width)
            for given in ((None, None), (made(TOKENS, HIDDEN), made(TOKENS, STREAMS))):
                normed = join_streams(*given, streams, gain, 1e-6, STREAMS, pdl=False)
            for count in (STREAMS, 0):
                stream_gates(made(TOKENS, RANK + count), STREAMS, count > 0, pdl=False)
            mix_streams(streams, normed, STREAMS, pdl=False)
            for rounds in (0, 20):
                rule = StreamRule(STREAMS, 1e-5, 1e-6, 2.0, num_rounds=rounds)
                weights = read_streams(streams, torch.zeros(TOKENS, rule.num_logits), torch.zeros(3 if rounds else 2),
                                       torch.zeros(rule.num_logits), rule, pdl=False)
                write_streams(streams, made(TOKENS, HIDDEN), *weights[1:], pdl=False)
            index_keys, keys = made(4, PAGE, INDEX_DIM), made(4, PAGE, KV, DIM)
            rope = RopeRows(ints, torch.zeros(64, 64))
            for blocks in (TokenBlocks(4, 0), TokenBlocks(16, 1)):
                write_block_keys(made(TOKENS, INDEX_DIM), torch.zeros(INDEX_DIM), 1e-6, rope, ints, ints, contexts,
                                 index_keys, blocks, pdl=False)
                for splits in (1, 4):
                    chosen = torch.zeros(TOKENS, 512, dtype=torch.int32)
                    block_attention(made(TOKENS, HEADS, DIM), keys, keys, contexts, chosen, 0.1, blocks,
                                    num_splits=splits, pdl=False)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_kernels()))
