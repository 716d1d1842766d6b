"""Exact mode on the card: bits of engines with batch mates and drafts against those of requests alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.core.outputs import RequestOutput
from tests.engine.harness import Ask
from tests.gpu.rig import GpuRig, asks, loaded
from tests.gpu.test_engines import DRAFTERS, folder_of

Bits = list[tuple[list[int], list[dict[int, float]]]]
CASES = [("llama", "itself"), ("gemma4_shared", "assistant"), ("qwen3_moe", "ngram"), ("nemotron_h", "mtp"),
         ("qwen3_next", "mtp"), ("deepseek_v32", "mtp")]  # fmt: skip


def with_logprobs() -> list[Ask]:
    return [replace(ask, params=replace(ask.params, logprobs=20)) for ask in asks()]


def bits_of(outputs: Sequence[RequestOutput]) -> Bits:
    samples = [output.outputs[0] for output in outputs]
    return [(sample.token_ids, [{token: entry.logprob for token, entry in place.items()}
                                for place in sample.logprobs or []]) for sample in samples]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "drafter"), [
    pytest.param(family, drafter, id=family, marks=pytest.mark.together(f"{family} exact")) for family, drafter in CASES
])
def test_bits_are_those_of_the_request_alone(family: str, drafter: str) -> None:
    model, folder = loaded(folder_of(family), torch.bfloat16), folder_of(family)
    with GpuRig(model, source=folder, exact=True, enable_prefix_caching=False) as rig:
        alone = bits_of([rig.run([ask])[0] for ask in with_logprobs()])
    with GpuRig(model, source=folder, exact=True, speculative_config=DRAFTERS[drafter](family)) as rig:
        for _ in range(2):
            together = bits_of(rig.run(with_logprobs()))
            assert together == alone
        assert rig.engine.stats.num_draft_tokens > 0 and rig.engine.stats.num_hit_tokens > 0


@pytest.mark.gpu
def test_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="exact=True: on cuda it needs Triton kernels, and 16 bits"):
        GpuRig(loaded(folder_of("llama")), exact=True)
