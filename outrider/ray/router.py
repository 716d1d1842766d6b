"""A request router of Ray Serve with the policy of `outrider.replicas.policy`: a prompt goes to the replica that has
received its longest prefix, unless that replica has too much load.

The router runs in the process that sends the requests, and reads the block hashes from the request's first argument. A
request without a readable prompt is routed by load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.replicas.policy import PrefixRouter


class PrefixRequestRouter(RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        self._policy = PrefixRouter()
        self._num_live: Counter[str] = Counter()  # requests that were sent from here and have not ended, by replica

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which Ray Serve tries them: first the chosen one, then all others, in
        case its queue is full."""
        if not candidate_replicas:
            return []
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen = self._policy.choose(_blocks(pending_request), {name: self._num_live[name] for name in known})
        others = [replica for name, replica in known.items() if name != chosen]
        return [[known[chosen]], others] if others else [[known[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._num_live[replica_id.unique_id] += 1
        self._policy.remember(_blocks(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._num_live[replica_id.unique_id] -= 1

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.forget(replica_id.unique_id)


def _blocks(pending_request: PendingRequest | None) -> Sequence[int]:
    args = [] if pending_request is None else pending_request.args
    return args[0] if args and isinstance(args[0], list) else []
