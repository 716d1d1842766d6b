"""OutriderAdapter: the trainer's end of a rollout. verl makes one in every rank of the trainer."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from outrider.verl.buckets import drain, fill_buckets
from outrider.verl.replica import server_name


class OutriderAdapter(BaseRollout):
    """Wakes the replica's server, lets it sleep and gives it weights. The first rank of a replica does so; the others
    only take part in making the weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        size = self.config.tensor_model_parallel_size  # no other parallelism is served
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine:
            await self._ask("wake_up", tags=tags)

    async def release(self) -> None:
        if self.config.free_cache_engine:
            await self._ask("sleep")

    @torch.no_grad()
    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", *,
                             global_steps: int | None = None, peft_config: Any = None, base_sync_done: bool = True,
                             **unused: Any) -> None:
        """Replace all weights of the engine. If they do not come as a whole, the engine refuses requests."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"wire_format {wire_format!r} is not supported: set "
                                      "checkpoint_engine.backend to one that sends whole tensors, such as naive")
        if peft_config is not None and base_sync_done:
            raise NotImplementedError("weights of an adapter alone are not supported: set lora.merge=True")
        if not self.is_leader_rank:
            await drain(weights)
            return
        await self._ask("start_weight_update")
        most_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        async for bucket in fill_buckets(weights, most_bytes):
            try:
                await self._ask("load_bucket", bucket)
            finally:
                bucket.remove()
        await self._ask("finish_weight_update", global_steps)

    async def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        if not self.is_leader_rank:
            return None
        if self._server is None:  # it starts after the trainer
            self._server = ray.get_actor(server_name(self.replica_rank))
        return await getattr(self._server, method).remote(*args, **named)
