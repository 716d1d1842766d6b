"""RolloutServer: the Ray actor of one replica. It runs an engine, answers verl's calls and serves the engine's HTTP
routes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from verl.utils.device import get_visible_devices_keyword
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.utils import run_uvicorn

from outrider.async_llm import AsyncLLM
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.engine.weight_files import read_packed
from outrider.server.app import build_app
from outrider.server.engine_host import EngineHost, Failed, Loading
from outrider.server.service import Service
from outrider.server.settings import ServerConfig
from outrider.verl.buckets import Bucket
from outrider.verl.rollout_settings import engine_settings, sampling_settings, sleep_level

LOOK_SECONDS = 0.05  # between two looks at a state that changes in another thread


class RolloutServer:
    def __init__(self, config: Any, model_config: Any, mode: RolloutMode, replica_rank: int,
                 devices: Sequence[str]) -> None:
        """devices: the GPUs of the replica; none: a CPU."""
        if devices:
            os.environ[get_visible_devices_keyword()] = ",".join(devices)
        self._config, self._mode = config, mode
        self._sleep_level = sleep_level(config, is_hybrid=mode == RolloutMode.HYBRID)
        settings = engine_settings(config, model_config, replica_rank)
        self._host = EngineHost(lambda: AsyncLLM(**settings), max_restarts=0)
        self._name = str(model_config.local_path)
        self._global_steps: int | None = None
        self._refuses = False  # requests that come during a pause

    async def launch_server(self) -> str:
        """Start the engine and its routes. Returns their address."""
        app = build_app(Service(self._host, ServerConfig(), (self._name,), None))
        address = ray.util.get_node_ip_address().strip("[]")
        port, self._serving = await run_uvicorn(app, None, address)
        while isinstance(self._host.state, Loading):
            await asyncio.sleep(LOOK_SECONDS)
        if isinstance(self._host.state, Failed):
            raise self._host.state.error
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    @property
    def _llm(self) -> AsyncLLM:
        return self._host.llm

    # Requests

    async def generate(self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str,
                       image_data: list[Any] | None = None, video_data: list[Any] | None = None,
                       audio_data: list[Any] | None = None, mm_processor_kwargs: dict[str, Any] | None = None,
                       priority: int = 0) -> TokenOutput:
        """Run one request. A pause ends it early, with stop_reason `aborted` and the tokens that it has."""
        if video_data or audio_data:
            raise NotImplementedError("videos and sounds are not served: leave video_data and audio_data out")
        if self._refuses:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._global_steps})
        params = SamplingParams(**sampling_settings(self._config, sampling_params, len(prompt_ids)))
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if image_data:
            prompt |= {"multi_modal_data": {"image": image_data}, "mm_processor_kwargs": mm_processor_kwargs}
        last: Any = None
        async for output in self._llm.generate(prompt, params, request_id=request_id, priority=priority):
            last = output
        assert isinstance(last, RequestOutput), "a request ends with an output"
        return self._answer(last, params)

    def _answer(self, output: RequestOutput, params: SamplingParams) -> TokenOutput:
        (sample,), told = output.outputs, output.metrics
        if sample.error is not None:
            raise RuntimeError(sample.error)
        fields: dict[str, Any] = {
            "global_steps": self._global_steps, "num_cached_tokens": output.num_cached_tokens,
            "spec_num_draft_tokens": told.num_draft_tokens, "spec_num_accepted_tokens": told.num_accepted_tokens,
            "spec_num_verify_steps": told.num_steps,
        }
        if sample.sampling_mask is not None:
            fields["sampling_mask"] = sample.sampling_mask.token_ids
        if output.prompt_logprobs is not None:
            num = params.prompt_logprobs or 1
            rows = [list((row or {}).items())[-num:] for row in output.prompt_logprobs[1:]]
            # The last row stands for the token after the prompt, as verl pads it.
            fields["prompt_ids"] = [*([token for token, _ in row] for row in rows), [0] * num]
            fields["prompt_logprobs"] = [*([own.logprob for _, own in row] for row in rows), [0.0] * num]
        logprobs = None if sample.logprobs is None else [
            entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        reason = sample.finish_reason
        return TokenOutput(
            token_ids=sample.token_ids, log_probs=logprobs, routed_experts=sample.routed_experts,
            stop_reason="aborted" if reason == "abort" else "completed" if reason in ("stop", "length") else reason,
            num_preempted=told.num_preemptions, extra_fields=fields)

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Pause, and end running requests with what they have. Later ones wait, or end at once with
        `reject_request`."""
        self._refuses = reject_request
        num = self._llm.engine.num_requests
        await self._llm.pause_generation(mode="abort", clear_cache=reset_prefix_cache)
        return {"aborted_count": num}

    async def resume_generation(self) -> None:
        self._refuses = False
        await self._llm.resume_generation()

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        num = await self._llm.abort_matching(lambda live: live == request_id)
        return {"aborted": num > 0, "request_id": request_id}

    async def wait_for_requests_to_drain(self) -> None:
        while self._llm.engine.num_requests:
            await asyncio.sleep(LOOK_SECONDS)

    # Memory

    async def sleep(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.STANDALONE:
            await self._llm.sleep(self._sleep_level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._mode != RolloutMode.STANDALONE:
            await self._llm.wake_up(tags)

    async def release_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.COLOCATED:
            await self._llm.sleep(1)
            await self._llm.wake_up(["weights"])

    async def resume_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.COLOCATED:
            await self._llm.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        await self._llm.reset_prefix_cache()

    # Weights

    async def start_weight_update(self) -> None:
        await self._llm.start_weight_update()

    async def load_bucket(self, bucket: Bucket) -> None:
        tensors: Any = read_packed(Path(bucket.path), bucket.names, bucket.dtypes, bucket.shapes)
        await self._llm.load_weights(tensors)

    async def finish_weight_update(self, global_steps: int | None = None) -> None:
        """End the update. If weights are missing, this raises an error with their names."""
        await self._llm.finish_weight_update()
        await self._llm.reset_prefix_cache()
        self._global_steps = global_steps if global_steps is not None else self._global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        self._global_steps = global_steps

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (),
                             kwargs: dict[str, Any] | None = None) -> list[Any]:
        return await self._llm.collective_rpc(method, timeout, args, kwargs)

    def get_rollout_config(self) -> Any:
        return self._config

    async def start_profile(self, **unused: Any) -> None:
        await self._llm.start_profile()

    async def stop_profile(self) -> None:
        await self._llm.stop_profile()
