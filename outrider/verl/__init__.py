"""A rollout for verl under the name `outrider`: VERL_USE_EXTERNAL_MODULES=outrider.verl registers it in every process.

`replica.py` starts a server actor on Ray for every replica (`server.py`), which runs an engine and its HTTP routes.
`adapter.py` is the trainer's end: it sends weights through the shared memory of the machine (`buckets.py`). Written
against verl 0.9.1; needs `ray` and `verl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.verl.replica import OutriderReplica

NAME = "outrider"  # of the rollout, in verl's `actor_rollout_ref.rollout.name`


def register() -> None:
    """Add the rollout to verl's two registries in this process. Calling it again changes nothing."""
    from verl.workers.rollout import base, replica

    registry: dict[tuple[str, str], str] = base._ROLLOUT_REGISTRY
    registry[NAME, "async"] = "outrider.verl.adapter.OutriderAdapter"
    replica.RolloutReplicaRegistry.register(NAME, _replica_class)


def _replica_class() -> type[OutriderReplica]:
    from outrider.verl.replica import OutriderReplica

    return OutriderReplica


def __getattr__(name: str) -> Any:
    raise AttributeError(f"outrider.verl has no {name!r}: verl finds the rollout by its name, {NAME!r}")


register()
