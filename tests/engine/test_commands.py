"""Commands to the worker: in order with steps, answered, and harmless to requests when they fail."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from outrider import LLM
from outrider.async_llm import AsyncLLM, EngineError
from outrider.config import EngineConfig
from outrider.core import ScheduledBatch
from outrider.engine.start import start_engine
from outrider.runner.commands import Command
from outrider.runner.interface import WorkerDied
from tests.engine.harness import CONFIGS, Rig, greedy, prompt_of, save_folder, tiny_model, tokens_of

SETTINGS: dict[str, Any] = {"dtype": "float64", "device": "cpu", "max_model_len": 96, "max_num_seqs": 3,
                            "max_num_batched_tokens": 48, "num_pages": 64, "overlap": True}
PROMPTS = [prompt_of(1, 40), prompt_of(2, 6) * 4, prompt_of(3, 9)]


@dataclass(frozen=True)
class Watch(Command[None]):
    """From now on the worker notes the steps that it has run."""

    def carry_out(self, worker: Any) -> None:
        worker.seen = []
        worker.runner._before_step = lambda batch: worker.seen.append(batch.step)


@dataclass(frozen=True)
class Seen(Command[tuple[int, ...]]):
    """The steps that the worker has run since it watches."""

    def carry_out(self, worker: Any) -> tuple[int, ...]:
        return tuple(worker.seen)


@dataclass(frozen=True)
class Fail(Command[None]):
    def carry_out(self, worker: Any) -> None:
        raise ValueError("this command always fails")


@dataclass(frozen=True)
class AnswerOddly(Command[Callable[[], None]]):
    """Answers with something that no pipe carries."""

    def carry_out(self, worker: Any) -> Callable[[], None]:
        return lambda: None


@dataclass(frozen=True)
class Exit(Command[None]):
    def carry_out(self, worker: Any) -> None:
        raise SystemExit(3)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("there are no words for it")


@dataclass(frozen=True)
class RaiseMute(Command[None]):
    def carry_out(self, worker: Any) -> None:
        raise Mute


def read_at_home(process_id: int) -> None:
    if os.getpid() != process_id:
        raise ImportError("there is no such class here")


class Native:
    """Can be read in the process that it comes from, and nowhere else."""

    def __reduce__(self) -> Any:
        return read_at_home, (os.getpid(),)


@dataclass(frozen=True)
class AnswerNatively(Command[Native]):
    def carry_out(self, worker: Any) -> Native:
        return Native()


class UnknownThere(Native, Command[None]):
    def carry_out(self, worker: Any) -> None: ...


@dataclass(frozen=True)
class Die(Command[None]):
    def carry_out(self, worker: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_command_comes_after_the_steps_before_it_and_before_those_after_it() -> None:
    """Two steps are in flight, and neither has begun, when the command is given."""
    with Rig(tiny_model("llama"), poison=False, depth=2) as rig:
        engine, gate, begun = rig.engine, threading.Event(), threading.Event()
        ran: list[int] = []

        def before_step(batch: ScheduledBatch) -> None:
            if batch.step == 1:
                begun.set()
                assert gate.wait(60)
            ran.append(batch.step)

        rig.runner._before_step = before_step
        engine.add({"a": engine.checks.check(list(PROMPTS[0]), greedy(8))})
        engine.step()
        engine._submit()
        assert begun.wait(60) and engine.worker.num_in_flight == 2
        runner: Any = engine.runner
        runner.seen = ran
        future = runner.command(Seen())
        gate.set()
        while engine.has_work:
            engine.step()
        assert future.result() == (0, 1)
        assert ran == list(range(len(ran))) and len(ran) > 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("commands") / "llama", CONFIGS["llama"], seed=3))


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[list[int]]]:
    with LLM(model, **SETTINGS) as llm:
        return tokens_of(llm.generate([list(p) for p in PROMPTS], greedy(20)))


@pytest.mark.parametrize("in_process", [False, True], ids=["thread", "process"])
def test_commands_between_steps_are_answered_and_harm_no_request(model: str, in_process: bool,
                                                                 expected: list[list[list[int]]]) -> None:
    llm = LLM.around(start_engine(EngineConfig(model, **SETTINGS), in_process=in_process))
    with llm:
        runner, engine = llm.engine.runner, llm.engine
        runner.command(Watch()).result()
        futures, outputs = [], {}
        for output in llm.follow([list(p) for p in PROMPTS], greedy(20)):
            futures.append((engine.scheduler.stats.num_steps, runner.command(Fail()), runner.command(Seen())))
            if in_process:
                futures[-1] += (runner.command(AnswerOddly()),)  # type: ignore[assignment]
            outputs[output.request_id] = output
        for num_submitted, failed, seen, *odd in futures:
            assert seen.result() == tuple(range(num_submitted))
            for future in (failed, *odd):
                with pytest.raises(Exception, match="always fails" if future is failed else "pickle|local object"):
                    future.result()
        assert isinstance(futures[0][1].exception(), ValueError)
        assert tokens_of([outputs[key] for key in sorted(outputs)]) == expected


@pytest.mark.parametrize("in_process", [False, True], ids=["thread", "process"])
def test_a_command_can_fail_in_odd_ways_and_requests_go_on(model: str, in_process: bool,
                                                           expected: list[list[list[int]]]) -> None:
    faults: list[tuple[Command[Any], str, str]] = [
        (Exit(), "SystemExit|RuntimeError", "3"), (RaiseMute(), "Mute|Exception", "cannot be shown")]
    if in_process:
        faults += [(AnswerNatively(), "ImportError", "no such class"), (UnknownThere(), "ImportError", "no such class")]
    llm = LLM.around(start_engine(EngineConfig(model, **SETTINGS), in_process=in_process))
    with llm:
        for command, kind, words in faults:
            error = llm.engine.runner.command(command).exception(timeout=60)
            assert re.fullmatch(kind, type(error).__name__)
            assert not in_process or words in str(error)
        assert tokens_of(llm.generate([list(p) for p in PROMPTS], greedy(20))) == expected


def test_a_command_that_exits_leaves_the_thread_of_the_engine(model: str, expected: list[list[list[int]]]) -> None:
    async def main() -> None:
        async with AsyncLLM(model, **SETTINGS) as llm:
            call = llm._owner.call(lambda: llm.engine.command(Exit()))
            assert isinstance(await asyncio.to_thread(call.exception, 60), SystemExit)
            *_, last = [output async for output in llm.generate(list(PROMPTS[0]), greedy(20))]
            assert [last.outputs[0].token_ids] == expected[0]

    asyncio.run(asyncio.wait_for(main(), timeout=300))


def test_a_worker_that_dies_during_a_command_is_the_end_of_the_engine(model: str) -> None:
    class Local(Command[None]):
        def carry_out(self, worker: Any) -> None: ...

    llm = LLM.around(start_engine(EngineConfig(model, **SETTINGS), in_process=True))
    with pytest.raises(Exception, match="pickle|local object"):  # refused where it is given, with nothing sent
        llm.engine.command(Local())
    with pytest.raises(WorkerDied, match="the worker process died .signal SIGKILL."):
        llm.engine.command(Die())
    with pytest.raises(WorkerDied, match="SIGKILL"):
        llm.generate(list(PROMPTS[0]), greedy(4))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        llm.sleep()
    llm.close()


def test_every_reader_hears_of_a_worker_that_died_during_a_command(model: str) -> None:
    engine = start_engine(EngineConfig(model, **SETTINGS), in_process=True)

    async def main() -> None:
        async with AsyncLLM.around(engine) as llm:
            stream = llm.generate(list(PROMPTS[0]), greedy(50))
            await anext(stream)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await asyncio.wrap_future(llm._owner.call(lambda: engine.command(Die())))
            with pytest.raises(EngineError, match="SIGKILL"):
                _ = [output async for output in stream]
            assert not llm.is_running
            with pytest.raises(EngineError):
                await llm.sleep()

    asyncio.run(asyncio.wait_for(main(), timeout=300))
