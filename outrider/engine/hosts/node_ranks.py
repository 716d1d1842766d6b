"""start_over_nodes: starts the ranks of node 0, and those of the other nodes after these have joined. No torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

from outrider.config import EngineConfig
from outrider.engine.hosts.host_link import RankPipe
from outrider.engine.hosts.meeting import meet_nodes, ranks_of
from outrider.engine.rank_processes import RankStarter, make_links
from outrider.engine.rank_watch import RankProcess
from outrider.feature_list import registered_names
from outrider.models.sources.model_source import ModelSource

if TYPE_CHECKING:
    from outrider.runner.rank_link import HostPlace

log = logging.getLogger("outrider")


@dataclass(frozen=True)
class RankJob:
    """The values that a node gets from node 0 to start its ranks, beside the settings and the node's own files."""

    features: tuple[str, ...]
    level: int
    host: HostPlace


def start_over_nodes(config: EngineConfig,
                     source: ModelSource) -> tuple[Sequence[RankProcess], Sequence[RankPipe | Connection]]:
    """Start all ranks. Returns their processes and pipes, in the order of ranks."""
    if config.node_rank > 0:
        raise ValueError(f"node_rank={config.node_rank}: the engine is on node 0; this node only holds ranks, so start "
                         f"`outrider serve MODEL --nnodes {config.nnodes} --node-rank {config.node_rank}` on it")
    host, nodes = meet_nodes(config, source)
    links = make_links(range(1, config.tensor_parallel_size))
    mine = ranks_of(0, config)
    ends = {0: tuple(first for first, _ in links.values())} | {rank: (links[rank][1],) for rank in mine if rank > 0}
    features, level = registered_names(), log.getEffectiveLevel()
    try:
        started = RankStarter(config, source, features, level, host).start(ends)
        for node in nodes:
            job = bytes(ForkingPickler.dumps(RankJob(features, level, node.place)))
            node.start(job, {own.rank: links[own.rank][1] for own in node.ranks})
    except BaseException:
        for node in nodes:
            node.lose("node 0 did not start")
        raise
    remote = [own for node in nodes for own in node.ranks]
    return [*(one.own for one in started), *remote], [*(one.pipe for one in started), *(own.pipe for own in remote)]
