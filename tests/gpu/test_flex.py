"""FlexAttention on the card, where it is compiled: against the torch backend, and captured in whole engines."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.mixers.batch import BatchView, ExtraKeys
from outrider.mixers.paged.backend import Backend, PagedMixer
from outrider.mixers.paged.flex_backend import FlexBackend
from outrider.mixers.paged.torch_backend import TorchBackend
from outrider.mixers.pool import DevicePool
from tests.engine.flex_cases import DIM, HEADS, KV_HEADS, Case, random_case
from tests.engine.harness import Ask, prompt_of, tokens_of
from tests.engine.masks import ChunkedMask, DocumentMask
from tests.gpu.rig import GpuRig, loaded, scratch
from tests.gpu.test_engines import folder_of, spec
from tests.models.oracle import make_folder

pytestmark = [pytest.mark.gpu]
CUDA = torch.device("cuda")
KINDS, TILES = 2, 2  # layers with a window and without; tiles of decoding and of prompts
MIB = 1 << 20


def num_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def on_card(view: BatchView) -> BatchView:
    def moved(value: Any) -> Any:
        if isinstance(value, ExtraKeys):
            return ExtraKeys(value.starts.cuda(), value.ends.cuda())
        if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
            return tuple(part.cuda() for part in value)
        return value.cuda() if isinstance(value, torch.Tensor) else value

    return BatchView(**{field.name: moved(getattr(view, field.name)) for field in fields(view)})


def outputs(case: Case, backend: Backend, index: int, seed: int, mask: dict[str, Any]) -> torch.Tensor:
    """The outputs of the live token rows."""
    dtype, generator = case.pool.dtype, torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(case.view.num_tokens, heads, DIM, generator=generator).to(dtype).cuda()
               for heads in (HEADS, KV_HEADS, KV_HEADS))
    pool = DevicePool(case.layout, len(case.pool.data), dtype, CUDA)
    pool.data.copy_(case.pool.data)
    view = on_card(case.view)
    out = PagedMixer([case.layer(index, **mask)], pool, backend).bind(view)[index](q, k, v)
    offset = torch.arange(len(q), device=CUDA) - view.query_starts[view.request_of]
    return out[offset < view.live[view.request_of]].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_attention_equals_the_torch_backend(dtype: torch.dtype) -> None:
    masks: list[dict[str, Any]] = [{}, {"mask": ChunkedMask(24)}, {"mask": DocumentMask()}]
    for seed, (page_tokens, index) in enumerate([(16, 0), (16, 1), (64, 0)]):
        own, reference = (outputs(random_case(seed, page_tokens, dtype=dtype), backend, index, seed, masks[seed])
                          for backend in (FlexBackend(), TorchBackend()))
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(own, reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_captured_steps_give_the_tokens_of_the_torch_backend(drafter: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    asks = [Ask(prompt_of(seed, length), params) for seed, length in enumerate((5, 40, 17, 60, 33))]
    asks.append(Ask(prompt_of(9, 50), params, spans=((4, 20), (25, 50))))
    config = None if drafter == "none" else spec("ngram") | {"prompt_lookup_min": 1}
    found = []
    for backend in ("flex", "torch"):
        with GpuRig(loaded(folder_of("gemma3")), speculative_config=config, attention_backend=backend) as rig:
            found.append(tokens_of(rig.run(asks)))
            assert (rig.runner.num_replays > 0) == (backend == "flex")
    assert found[0] == found[1]


def test_attention_is_compiled_at_the_start_and_never_again() -> None:
    """Once for each kind of layer and tile: not for other batches, lengths and drafts."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    asks = [Ask(prompt_of(seed, length), params) for seed, length in enumerate((3, 90, 17, 60, 41, 8, 29))]
    torch._dynamo.reset()
    before = num_compiled()
    with GpuRig(loaded(folder_of("gemma3")), speculative_config=spec("ngram") | {"prompt_lookup_min": 1},
                attention_backend="flex", overlap=True) as rig:
        started = num_compiled()
        assert 0 < started - before <= KINDS * TILES
        first = tokens_of(rig.run(asks))
        assert [tokens_of(rig.run([ask]))[0] for ask in asks] == first
        assert num_compiled() == started and rig.engine.stats.num_draft_tokens > 0 and rig.runner.num_replays > 0


def test_buffers_are_small_with_long_contexts() -> None:
    folder = make_folder("gemma3", scratch() / "gemma3 of 128k", max_position_embeddings=131072)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with GpuRig(loaded(folder), poison=False, attention_backend="flex", max_model_len=131072, max_num_seqs=256,
                max_num_batched_tokens=8192, num_pages=20000) as rig:
        outputs = rig.run([Ask(prompt_of(seed, 20), params) for seed in range(256)])
        assert not any(output.outputs[0].error for output in outputs) and rig.runner.num_replays > 0
        backend = rig.step.backend
        assert isinstance(backend, FlexBackend)
        assert 0 < sum(buffer.nbytes for buffer in backend._buffers.values()) < 64 * MIB
