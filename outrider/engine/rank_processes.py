"""Starts the processes of a machine's ranks, with their pipes and shared memory. No torch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from outrider.config import EngineConfig
from outrider.engine.rank_watch import RankProcess
from outrider.engine.spawned import check_sent, spawn_process
from outrider.engine.worker_child import RankPlace, serve
from outrider.models.sources.model_source import ModelSource
from outrider.runner.rank_link import HostPlace, RankLink
from outrider.runner.rank_status import STATUS_FIELDS, RankStatus


@dataclass(frozen=True)
class StartedRank:
    """A rank's process and this process's end of the pipe to it."""

    own: RankProcess
    pipe: Connection
    numbers: MutableSequence[int]  # shared memory of its RankStatus


@dataclass(frozen=True)
class RankStarter:
    """Starts ranks of a machine, with the values that all of them are given."""

    config: EngineConfig
    source: ModelSource
    features: tuple[str, ...]  # that are registered where the engine is
    level: int  # of the log
    host: HostPlace = field(default_factory=HostPlace)

    def start(self, links: Mapping[int, tuple[Connection, ...]]) -> list[StartedRank]:
        """Start the ranks with these numbers. links: for each rank, its ends of the pipes between rank 0 and the other
        ranks."""
        check_sent(self.config, self.source)
        context = multiprocessing.get_context("spawn")
        count = self.config.tensor_parallel_size
        process_ids = context.RawArray("q", count)
        started = []
        for rank, ends in links.items():
            own, theirs = context.Pipe()
            numbers = context.RawArray("q", STATUS_FIELDS)
            place = RankPlace(RankLink(rank, count, ends, host=self.host), numbers, process_ids, self.features)
            process = spawn_process(serve, (theirs, self.config, self.source, self.level, place),
                                    name=f"outrider-worker-{rank}" if count > 1 else "outrider-worker", daemon=True)
            theirs.close()  # or the pipe would not end with the child
            shown = RankProcess(rank, process, RankStatus(numbers), self.host.words)
            started.append(StartedRank(shown, own, numbers))
        for ends in links.values():
            for end in ends:
                end.close()
        return started


def make_links(others: Iterable[int]) -> dict[int, tuple[Connection, Connection]]:
    """Make a pipe between rank 0 and each other rank. Returns rank 0's end and the other one, by rank."""
    context = multiprocessing.get_context("spawn")
    return {rank: context.Pipe() for rank in others}
