"""`collective_rpc` with a worker's class of a trainer's own, by the calls of OpenRLHF 0.11.2."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from outrider.compat.modules.inputs import TokensPrompt
from tests.engine.harness import with_other_weights
from tests.engine.test_update_weights import SETTINGS, llama

PLACE = f"{__name__}.Extension"
SENT: dict[str, torch.Tensor] = {}  # what the trainer's broadcast would bring
PROMPT, GREEDY = [5, 6, 7] * 4, SamplingParams(temperature=0, max_tokens=8)


class Extension:
    """What OpenRLHF's WorkerWrap reads of itself, without its broadcast."""

    def update_weight(self: Any, name: str, dtype: torch.dtype, shape: list[int], empty_cache: bool = False) -> int:
        assert torch.distributed.is_initialized() and torch.distributed.get_rank() == 0
        assert dtype == self.model_config.dtype and self.device.type == "cpu"
        weight = torch.empty(shape, dtype=dtype, device=self.device)
        weight.copy_(SENT[name])
        self.model_runner.model.load_weights(weights=[(name, weight)])
        return self.rank

    def fail(self) -> None:
        raise RuntimeError("the trainer's own error")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama(tmp_path)


@pytest.fixture
def other(folder: Path) -> Path:
    path = with_other_weights(folder, folder.parent / "other")
    SENT.clear()
    SENT.update(load_file(path / "model.safetensors"))
    return path


def tokens(llm: LLM) -> list[int]:
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def test_methods_of_the_trainers_class_load_weights(folder: Path, other: Path) -> None:
    with LLM(str(other), **SETTINGS) as llm:
        wanted = tokens(llm)
    with LLM(str(folder), worker_extension_cls=PLACE, **SETTINGS) as llm:
        assert tokens(llm) != wanted
        for name, tensor in SENT.items():
            assert llm.collective_rpc("update_weight", args=(name, tensor.dtype, list(tensor.shape))) == [0]
        llm.reset_prefix_cache()
        assert tokens(llm) == wanted and llm.weights_version == 1
        assert llm.collective_rpc(lambda worker, more: (type(worker).__mro__[1], more), kwargs={"more": 3}) == [
            (Extension, 3)]
        with pytest.raises(RuntimeError, match="the trainer's own error"):
            llm.collective_rpc("fail")
        for method in ("nothing", "_make", "device"):
            with pytest.raises(ValueError, match="Extension has no public method"):
                llm.collective_rpc(method)


def test_a_class_is_needed(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm, pytest.raises(ValueError, match="with worker_extension_cls"):
        llm.collective_rpc("update_weight")
    for place in ("nothing.of.it", "Extension", f"{__name__}.PLACE"):
        with (LLM(str(folder), worker_extension_cls=place, **SETTINGS) as llm,
              pytest.raises(ValueError, match="^worker_extension_cls")):
            llm.collective_rpc("update_weight")


def test_the_calls_of_openrlhfs_engine(folder: Path, other: Path) -> None:
    with LLM(str(other), **SETTINGS) as llm:
        wanted = tokens(llm)

    async def work() -> None:
        llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(
            str(folder), enforce_eager=True, worker_extension_cls=PLACE, tensor_parallel_size=1, seed=3,
            distributed_executor_backend="uni", enable_prefix_caching=True, trust_remote_code=True,
            gpu_memory_utilization=0.5, enable_sleep_mode=True, max_logprobs=1, logprobs_mode="processed_logprobs",
            **SETTINGS))
        try:
            assert not await llm.is_sleeping()
            await llm.sleep(level=1)
            for tag in ("weights", "kv_cache"):
                await llm.wake_up(tags=[tag])
            running = asyncio.ensure_future(generated(llm, "a", SamplingParams(max_tokens=40, ignore_eos=True)))
            while llm.output_processor.get_num_unfinished_requests() != 1:
                await asyncio.sleep(0.01)
            await llm.pause_generation(mode="keep")
            for name, tensor in SENT.items():
                assert await llm.collective_rpc("update_weight", args=(name, tensor.dtype, tensor.shape, False)) == [0]
            await llm.reset_prefix_cache()
            await llm.resume_generation()
            versions = (await running).outputs[0].weight_versions
            assert {version for version, _, _ in versions} <= {0, 1} and versions[-1][0] == 1
            assert (await generated(llm, "b", GREEDY)).outputs[0].token_ids == wanted
            assert llm.output_processor.get_num_unfinished_requests() == 0
        finally:
            llm.shutdown()

    asyncio.run(work())


async def generated(llm: AsyncLLMEngine, name: str, params: SamplingParams) -> Any:
    async for output in llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params, request_id=name):
        final = output
    return final
