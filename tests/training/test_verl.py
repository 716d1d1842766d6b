"""verl's rollout on a Ray cluster of this machine: verl 0.9.1's own registries and base classes, and a trainer's rank
that sends the weights of a model of transformers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.harness import prompt_of
from tests.models.oracle import hf_model, make_folder

pytestmark = pytest.mark.long
ray = pytest.importorskip("ray")
pytest.importorskip("verl")
FAMILY = "qwen3_moe_mixed"
PROMPT = prompt_of(1, 9)
ENGINE = {"device": "cpu", "num_pages": 300, "skip_tokenizer_init": True}


@dataclass
class ModelConfig:
    """The fields of verl's HFModelConfig that a rollout reads. The whole of it wants a tokenizer."""

    local_path: str
    lora_rank: int = 0
    lora: dict[str, Any] = field(default_factory=dict)


def rollout_config(**more: Any) -> Any:
    from verl.workers.config import RolloutConfig
    from verl.workers.config.rollout import CheckpointEngineConfig

    given: dict[str, Any] = {
        "name": "outrider", "dtype": "float32", "tensor_model_parallel_size": 1, "max_model_len": 512,
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "prompt_length": 16, "response_length": 8,
        "engine_kwargs": {"outrider": ENGINE}, "enable_rollout_routing_replay": True,
        "checkpoint_engine": CheckpointEngineConfig(update_weights_bucket_megabytes=0)}  # a bucket for every tensor
    return RolloutConfig(**given | more)


class Rank:
    """A rank of the trainer: an actor with a GPU, of which the cluster only believes that it is there."""

    def __init__(self, config: Any, model_config: Any) -> None:
        os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
        from verl.workers.rollout.base import get_rollout_class

        self._adapter: Any = get_rollout_class("outrider")(config, model_config, None)

    async def ask(self, method: str, *args: Any, **named: Any) -> None:
        await getattr(self._adapter, method)(*args, **named)

    async def update(self, folder: str, leaves_out: str | None = None, **named: Any) -> None:
        model = hf_model(Path(folder))
        await self._adapter.update_weights(
            ((name, tensor) for name, tensor in model.named_parameters() if name != leaves_out), **named)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    variables = {"VERL_USE_EXTERNAL_MODULES": "outrider.verl", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init(num_cpus=2, num_gpus=1, object_store_memory=80 << 20, include_dashboard=False,
             runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(FAMILY, tmp_path_factory.mktemp("models") / "one")


@torch.inference_mode()
def logprobs_of_transformers(folder: Path, ids: list[int], num: int) -> list[float]:
    """The log-probabilities of the last `num` ids."""
    logits = hf_model(folder, attn_implementation="eager")(torch.tensor([ids])).logits[0, :-1].double()
    rows = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return [float(row) for row in rows[-num:, 0]]


def read(replica: Any, path: str) -> str:
    with urllib.request.urlopen(f"http://{replica.server_address}{path}") as answer:
        return str(answer.read().decode())


def test_the_rollout_has_a_name_in_verls_registries() -> None:
    from verl.workers.rollout.base import BaseRollout, get_rollout_class
    from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

    import outrider.verl  # noqa: F401, which registers it

    assert issubclass(get_rollout_class("outrider"), BaseRollout)
    assert issubclass(get_rollout_replica_class("outrider"), RolloutReplica)


def test_a_replica_serves_what_the_trainer_has_sent(cluster: None, folder: Path, tmp_path: Path) -> None:
    """Weights are random until the first update. Log-probabilities and experts are those of transformers."""
    from verl.workers.rollout.replica import get_rollout_replica_class

    model = ModelConfig(str(folder))

    async def main() -> None:
        rank = ray.remote(Rank).options(num_gpus=1).remote(rollout_config(), model)
        replica = get_rollout_replica_class("outrider")(0, rollout_config(), model)
        await replica.init_hybrid(SimpleNamespace(workers=[rank]))
        server = replica.server_handle
        asked = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "logprobs": True}

        async def generate(name: str, **more: Any) -> Any:
            return await server.generate.remote(prompt_ids=PROMPT, sampling_params=asked | more, request_id=name)

        await rank.ask.remote("release")
        await rank.ask.remote("resume", ["weights"])
        await rank.update.remote(str(folder), global_steps=3)
        await rank.ask.remote("resume", ["kv_cache"])
        done = await generate("a")
        assert done.stop_reason == "completed" and len(done.token_ids) == 8
        assert done.extra_fields["global_steps"] == 3
        wanted = logprobs_of_transformers(folder, [*PROMPT, *done.token_ids], 8)
        assert np.abs(np.array(done.log_probs) - wanted).max() < 1e-4
        assert done.routed_experts.shape[0] == len(PROMPT) + 7

        with pytest.raises(Exception, match=r"lacks model\.norm\.weight|model\.norm\.weight"):
            await rank.update.remote(str(folder), leaves_out="model.norm.weight")
        with pytest.raises(Exception, match="update"):
            await generate("b")
        await rank.update.remote(str(folder), global_steps=4)
        assert (await generate("c")).extra_fields["global_steps"] == 4

        running = asyncio.ensure_future(generate("d", max_tokens=490))
        while not re.search(r"^vllm:num_requests_running\{.*\} 1", await asyncio.to_thread(read, replica, "/metrics"),
                            re.MULTILINE):
            assert not running.done()
        await replica.abort_all_requests(reject_request=True)
        partial = await running
        assert partial.stop_reason == "aborted" and len(partial.token_ids) < 490
        assert partial.routed_experts is None or len(partial.routed_experts) >= len(partial.token_ids)
        assert (await generate("e")).token_ids == [], "requests that come during the pause are refused"
        await replica.resume_generation()
        assert (await generate("f")).stop_reason == "completed"
        for call in ("clear_kv_cache", "release_kv_cache", "resume_kv_cache", "sleep", "wake_up"):
            await getattr(replica, call)()
        assert json.loads(read(replica, "/v1/models"))["data"][0]["id"] == str(folder)

    asyncio.run(main())


@pytest.mark.parametrize(("settings", "words"), [
    ({"data_parallel_size": 2}, "data_parallel_size must be 1"),
    ({"tensor_model_parallel_size": 16}, "spans 2 nodes"),
])
def test_what_a_replica_does_not_serve_is_refused(folder: Path, settings: dict[str, Any], words: str) -> None:
    from verl.workers.rollout.replica import get_rollout_replica_class

    import outrider.verl  # noqa: F401

    replica = get_rollout_replica_class("outrider")(0, rollout_config(**settings), ModelConfig(str(folder)))
    with pytest.raises(NotImplementedError, match=words):
        asyncio.run(replica.launch_servers())
