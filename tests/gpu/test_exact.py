"""Exact mode on the card: bits of engines with batch mates and drafts against those of requests alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.core.outputs import RequestOutput
from outrider.kernels.gpu.hopper.prefill import is_hopper
from outrider.kernels.gpu.hopper.products import HOPPER_TILES, launch_product
from outrider.kernels.gpu.linear.exact_linear import HOPPER_ROWS, chain_columns, exact_linear
from tests.engine.harness import Ask
from tests.gpu.rig import GpuRig, asks, loaded
from tests.gpu.test_engines import DRAFTERS, folder_of

Bits = list[tuple[list[int], list[dict[int, float]]]]
CASES = [("llama", "itself"), ("gemma4_shared", "assistant"), ("qwen3_moe", "ngram"), ("nemotron_h", "mtp"),
         ("qwen3_next", "mtp"), ("deepseek_v32", "mtp")]
IN_FP8 = [("llama", "itself"), ("gemma4_shared", "assistant"), ("deepseek_v32", "mtp")]


def with_logprobs() -> list[Ask]:
    return [replace(ask, params=replace(ask.params, logprobs=20)) for ask in asks()]


def bits_of(outputs: Sequence[RequestOutput]) -> Bits:
    samples = [output.outputs[0] for output in outputs]
    return [(sample.token_ids, [{token: entry.logprob for token, entry in place.items()}
                                for place in sample.logprobs or []]) for sample in samples]


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "drafter", "cache"), [
    pytest.param(family, drafter, cache, id=f"{family} {cache}", marks=pytest.mark.together(f"{family} exact"))
    for cases, cache in ((CASES, "auto"), (IN_FP8, "fp8")) for family, drafter in cases
])
def test_bits_are_those_of_the_request_alone(family: str, drafter: str, cache: str) -> None:
    model, folder = loaded(folder_of(family), torch.bfloat16), folder_of(family)
    with GpuRig(model, source=folder, exact=True, enable_prefix_caching=False, kv_cache_dtype=cache) as rig:
        alone = bits_of([rig.run([ask])[0] for ask in with_logprobs()])
    with GpuRig(model, source=folder, exact=True, speculative_config=DRAFTERS[drafter](family),
                kv_cache_dtype=cache) as rig:
        for _ in range(2):
            together = bits_of(rig.run(with_logprobs()))
            assert together == alone
        assert rig.engine.stats.num_draft_tokens > 0 and rig.engine.stats.num_hit_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(640, 4096), (4200, 1024), (2560, 10240)])
def test_products_of_many_token_rows_have_the_bits_of_few(n: int, k: int) -> None:
    """Outputs and token rows that no tile divides; one chain of additions, and several."""
    generator = torch.Generator("cuda").manual_seed(n)
    x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
                 for shape in ((2500, k), (n, k)))
    x[:, 5] *= 100  # additions in another order would show
    parts = torch.cat([exact_linear(part, weight) for part in x.split(60)])
    for rows in (HOPPER_ROWS - 1, HOPPER_ROWS, 1000, 2500):
        assert torch.equal(exact_linear(x[:rows], weight), parts[:rows])
    if is_hopper(x.device):
        for tile in HOPPER_TILES[chain_columns(n, k) < k :]:
            out = torch.full((2500, n), torch.nan, device="cuda", dtype=torch.bfloat16)
            launch_product(x, weight, out, chain_columns(n, k), tile)
            assert torch.equal(out, parts)


@pytest.mark.gpu
def test_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="exact=True: on cuda exact mode needs Triton and a dtype of 16 bits"):
        GpuRig(loaded(folder_of("llama")), exact=True)
