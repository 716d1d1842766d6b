"""OutriderReplica: starts the server actor of a replica on the GPUs of its workers."""

from __future__ import annotations

import asyncio

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.replica import RolloutReplica

from outrider.verl.server import RolloutServer


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """The name of a replica's actor. kind: `reward_` or `teacher_` of a replica that serves another model."""
    return f"outrider_server_{kind}{replica_rank}{suffix}"


class OutriderReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        """Start the actor, and wait until it serves."""
        self._check()
        places = await asyncio.gather(*[worker.__ray_call__.remote(_place_of) for worker in self.workers])
        (node,) = {node for node, _ in places}
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server = ray.remote(RolloutServer).options(
            name=server_name(self.replica_rank, kind, self.name_suffix), max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
        ).remote(self.config, self.model_config, self.rollout_mode, self.replica_rank,
                 [device for _, device in places if device is not None])
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.launch_server.remote()

    def _check(self) -> None:
        config = self.config
        for name in ("data_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size"):
            if (getattr(config, name) or 1) != 1:
                raise NotImplementedError(f"rollout.{name} must be 1: a replica has tensor_model_parallel_size ranks, "
                                          "and further replicas come with further GPUs")
        if self.nnodes != 1:
            raise NotImplementedError(f"a replica of {self.world_size} ranks spans {self.nnodes} nodes: lower "
                                      "rollout.tensor_model_parallel_size to the GPUs of one node")


def _place_of(worker: object) -> tuple[str, str | None]:
    """The node of a worker, and its GPU if it has one. Called in the worker's process."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_resource_name(), [])
    return context.get_node_id(), devices[0] if devices else None
