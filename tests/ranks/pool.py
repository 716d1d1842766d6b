"""A pool of ranks: forked processes in gloo groups, which carry out functions and live as long as the test session."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outrider.runner.ranks import ProcessRanks

MOST_RANKS = 4
DEADLINE = 300  # seconds in which every task ends, on a machine that is busy with other things


def serve_rank(rank: int, store: Path, tasks: Connection) -> None:
    """The process of one rank. Groups of fewer ranks are its first ones."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MOST_RANKS)
    groups = {count: dist.new_group(list(range(count))) for count in range(2, MOST_RANKS + 1)}
    while True:
        try:
            number, task, count, args = pickle.loads(tasks.recv_bytes())
        except EOFError:  # the session is over
            return
        try:
            answer = number, True, task(ProcessRanks(groups[count]), *args)
        except Exception:
            answer = number, False, traceback.format_exc()
        tasks.send_bytes(pickle.dumps(answer))


class RankPool:
    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("fork")  # a process that imports torch anew takes seconds
        self._pipes: list[Connection] = []
        self._processes = []
        self._num_tasks = 0
        for rank in range(MOST_RANKS):
            own, theirs = context.Pipe()
            process = context.Process(target=serve_rank, args=(rank, folder / "store", theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)

    def run(self, count: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of task(group, *args) on `count` ranks."""
        self._num_tasks += 1
        for pipe in self._pipes[:count]:
            pipe.send_bytes(pickle.dumps((self._num_tasks, task, count, args)))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes[:count]):
            number = 0
            while number != self._num_tasks:  # answers to a task that was given up come late
                assert pipe.poll(DEADLINE), f"rank {rank} of {count} gave no answer"
                number, is_done, result = pickle.loads(pipe.recv_bytes())
            (results if is_done else errors).append(result)
        assert not errors, errors[0]
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
