"""The parent's half of several ranks without processes: whose answer counts, which rank is blamed, how hosts agree."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.core.ranks import RankLost
from outrider.engine import worker_process
from outrider.engine.rank_answers import RankAnswers
from outrider.engine.rank_watch import (
    LOOK_SECONDS,
    SILENT_SECONDS,
    STARTING_SILENT_SECONDS,
    STUCK_SECONDS,
    RankProcess,
    RankWatch,
)
from outrider.engine.worker_messages import Failure
from outrider.engine.worker_process import WorkerProcess
from outrider.runner.commands import Sleep, SleepReport
from outrider.runner.interface import WorkerDied
from outrider.runner.rank_link import RankLink
from outrider.runner.rank_status import STATUS_FIELDS, Doing, RankStatus

FAILED, LOST = Failure(ValueError, "too warm", ""), Failure(RankLost, "lost the others", "")


def asked(num_ranks: int = 2, command: Any = None) -> tuple[RankAnswers, Future[Any]]:
    answers, future = RankAnswers(num_ranks), Future[Any]()
    answers.add(7, future, command)
    return answers, future


def test_rank_0_answers_a_step_by_itself() -> None:
    answers, future = asked()
    assert answers.take(0, 7, "result") is None
    assert future.result() == "result" and not answers.has_any


def test_a_step_that_fails_on_every_rank_fails() -> None:
    answers, future = asked()
    assert answers.take(1, 7, FAILED) is None and not future.done()
    assert answers.take(0, 7, FAILED) is None
    with pytest.raises(ValueError, match="too warm"):
        future.result()


@pytest.mark.parametrize("order", [[(0, "result"), (1, FAILED)], [(1, FAILED), (0, "result")]])
def test_a_step_that_fails_on_one_rank_alone_ends_all(order: list[tuple[int, Any]]) -> None:
    answers, _ = asked()
    errors = [answers.take(rank, 7, answer) for rank, answer in order]
    assert errors[0] is None and "rank 1 failed in step or command 7" in str(errors[1])


def test_a_rank_that_lost_the_others_is_not_to_blame() -> None:
    answers, future = asked()
    assert answers.take(0, 7, LOST) is None
    error = answers.take(1, 7, FAILED)
    assert error is not None and "rank 1 failed" in str(error) and "too warm" in str(error)
    answers.fail_all(error)
    assert future.exception() is error


def test_a_rank_that_does_not_fail_with_another_is_waited_for_no_longer_than_a_while() -> None:
    answers, _ = asked()
    answers.take(1, 7, FAILED)
    assert answers.overdue(100) is None
    assert "rank 1 failed" in str(answers.overdue(-1))


def test_answers_of_commands_are_combined() -> None:
    answers, future = asked(command=Sleep(1))
    assert answers.take(1, 7, SleepReport(4, 3, 2, 0.5)) is None and not future.done()
    answers.take(0, 7, SleepReport(4, 4, 0, 0.25))
    assert future.result() == SleepReport(8, 7, 2, 0.5)


def test_a_command_that_fails_on_one_rank_alone_ends_all() -> None:
    answers, _ = asked(command=Sleep(1))
    assert answers.take(1, 7, FAILED) is None
    assert "rank 1 failed" in str(answers.take(0, 7, SleepReport()))


class Watched:
    """Two ranks that a test lets live, work and die."""

    def __init__(self) -> None:
        self.statuses = [RankStatus([0] * STATUS_FIELDS) for _ in range(2)]
        self.processes: list[Any] = [SimpleNamespace(exitcode=None, pid=10 + rank) for rank in range(2)]
        self.watch = RankWatch([RankProcess(rank, self.processes[rank], self.statuses[rank]) for rank in range(2)])

    def looks(self, seconds: float, living: tuple[int, ...] = (0, 1), has_steps: bool = True) -> WorkerDied | None:
        for _ in range(int(seconds / LOOK_SECONDS)):
            for rank in living:
                self.statuses[rank].beat()
            error = self.watch.look(LOOK_SECONDS, has_steps=has_steps, has_any=has_steps)
            if error is not None:
                return error
        return None


def test_a_rank_that_shows_no_life_is_named() -> None:
    ranks = Watched()
    assert ranks.looks(2 * SILENT_SECONDS, living=(0,)) is None, "rank 1 has not begun: it imports the caller's script"
    assert ranks.looks(1) is None
    ranks.statuses[1].begin(Doing.STEP, 12)
    assert ranks.looks(SILENT_SECONDS - 1, living=(0,)) is None
    assert "rank 1 (process 11) ran step 12 and has shown no life" in str(ranks.looks(3, living=(0,)))


def test_a_rank_may_show_no_life_for_longer_while_it_starts() -> None:
    """The libraries of torch hold up all of its threads."""
    ranks = Watched()
    assert ranks.looks(1, has_steps=False) is None
    assert ranks.looks(STARTING_SILENT_SECONDS - 1, living=(0,), has_steps=False) is None
    assert "rank 1 (process 11) was starting and has" in str(ranks.looks(3, living=(0,), has_steps=False))


def test_a_rank_that_others_wait_for_is_named() -> None:
    ranks = Watched()
    with ranks.statuses[0].waiting():
        ranks.statuses[0].begin(Doing.STEP, 12)  # taken from the parent while the step before waits
        assert ranks.looks(STUCK_SECONDS - 1) is None
        ranks.statuses[1].begin(Doing.STEP, 13)
        assert ranks.looks(STUCK_SECONDS - 1) is None, "there was progress"
        error = str(ranks.looks(3))
    assert "rank 1 (process 11) ran step 13" in error and "rank 0" not in error


def test_ranks_without_work_may_rest_for_ever() -> None:
    assert Watched().looks(2 * STUCK_SECONDS, has_steps=False) is None


def test_ranks_survive_a_machine_that_was_suspended() -> None:
    ranks = Watched()
    assert ranks.watch.look(1e6, has_steps=True, has_any=True) is None


def test_a_death_is_told_once_its_last_messages_could_be_read() -> None:
    ranks = Watched()
    ranks.statuses[1].begin(Doing.STEP, 3)
    ranks.processes[1].exitcode = -9
    assert ranks.watch.look(0.5, has_steps=True, has_any=True) is None
    error = ranks.watch.look(0.5, has_steps=True, has_any=True)
    assert "the process of rank 1 died when it ran step 3 (signal SIGKILL)" in str(error)


def linked(num_ranks: int) -> list[RankLink]:
    pairs = [multiprocessing.Pipe() for _ in range(num_ranks - 1)]
    first = RankLink(0, num_ranks, tuple(own for own, _ in pairs))
    return [first, *(RankLink(rank, num_ranks, (theirs,)) for rank, (_, theirs) in enumerate(pairs, 1))]


def test_hosts_take_what_rank_0_decides_and_gather_what_each_has() -> None:
    found: dict[int, Any] = {}

    def work(link: RankLink) -> None:
        decided = link.decide(lambda: f"by rank {link.rank}")
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            link.decide(lambda: 1 // link.rank)
        found[link.rank] = decided, link.gather(link.rank * 10)

    threads = [threading.Thread(target=work, args=(link,)) for link in linked(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == dict.fromkeys(range(3), ("by rank 0", [0, 10, 20]))
    assert RankLink().gather(5) == [5] and RankLink().decide(lambda: 6) == 6


def test_ranks_measure_equally_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is a sum over ranks. Rank 0 finds shorter times again and again, and rank 1 none after the first."""
    from outrider.runner.graphs import costs

    counts = [0, 0]

    def step_seconds(step: Any, *_: Any) -> float:
        counts[step.ranks.link.rank] += 1
        return 1.0 if step.ranks.link.rank == 1 else 0.5 ** counts[0]

    monkeypatch.setattr(costs, "step_seconds", step_seconds)
    limits: Any = None
    steps: list[Any] = [SimpleNamespace(ranks=SimpleNamespace(link=link)) for link in linked(2)]
    threads = [threading.Thread(target=costs._uncaptured, args=(step, limits, [1, 2], False)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts[0] == counts[1] == 2 * costs.MOST_SWEEPS


def test_a_host_that_ended_is_named() -> None:
    first, second = linked(2)
    second.pipes[0].close()
    with pytest.raises(RankLost, match="rank 0 lost rank 1"):
        first.gather(1)


def test_ranks_that_cannot_share_the_heads_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would import torch first: 64 ranks took two minutes to be refused."""
    source: Any = SimpleNamespace(config={"architectures": ["LlamaForCausalLM"], "num_attention_heads": 32},
                                  config_file="folder/config.json")
    monkeypatch.setattr(worker_process, "_start", lambda *_: pytest.fail("processes were started"))
    words = "^folder/config.json: num_attention_heads is 32, which 64 ranks cannot share: use 1, 2, 4, 8, 16 or 32 rank"
    with pytest.raises(ValueError, match=words):
        WorkerProcess(EngineConfig("folder", tensor_parallel_size=64), source)
