"""A worker in a spawned process: the same tokens as in a thread, the same errors, and an end that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from outrider import LLM, SamplingParams, feature_list
from outrider.async_llm import AsyncLLM, EngineError
from outrider.config import EngineConfig
from outrider.engine.start import start_engine
from outrider.engine.worker_messages import Failure
from outrider.engine.worker_process import WorkerProcess
from outrider.feature_list import FeatureEntry, register_feature
from outrider.models.sources import SourceError
from outrider.runner.interface import WorkerDied
from tests.engine.harness import CONFIGS, greedy, prompt_of, save_folder, tokens_of
from tests.engine.recurrent_rig import HYBRIDS
from tests.engine.test_interrupts import Tracer, traced

SETTINGS: dict[str, Any] = {"dtype": "float64", "device": "cpu", "max_model_len": 96, "max_num_seqs": 3,
                            "max_num_batched_tokens": 48, "num_pages": 64, "overlap": True}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
PROMPTS = [prompt_of(1, 40), prompt_of(2, 6) * 4, [*prompt_of(1, 40)[:32], 7, 8], prompt_of(3, 9)]
PARAMS = [greedy(20), SamplingParams(seed=3, max_tokens=20, logprobs=2), greedy(20, stop_token_ids=[9]),
          SamplingParams(seed=4, temperature=0.7, top_k=40, max_tokens=20)]


def saved(path: Path, family: str) -> str:
    return str(save_folder(path / family, (CONFIGS | HYBRIDS)[family], seed=3))


def started(model: str, *, in_process: bool, **settings: Any) -> LLM:
    return LLM.around(start_engine(EngineConfig(model, **SETTINGS | settings), in_process=in_process))


def pid_of(llm: LLM) -> int:
    worker = llm.engine.runner
    assert isinstance(worker, WorkerProcess)
    (pid,) = worker.process_ids
    assert pid is not None
    return pid


@pytest.mark.parametrize("family", ["llama", "gated_delta"])
def test_the_same_tokens_in_a_thread_and_in_a_process(tmp_path: Path, family: str) -> None:
    model, found = saved(tmp_path, family), []
    for in_process in (False, True):
        # Fixed counts: what is drafted must not depend on times that were measured twice.
        with started(model, in_process=in_process, speculative_config=DRAFTS | {"auto": False}) as llm:
            rounds = [llm.generate([list(p) for p in PROMPTS], PARAMS) for _ in range(2)]  # the second one has hits
            stats = llm.engine.stats
            assert stats.num_hit_tokens > 0 and stats.num_accepted_tokens > 0
            assert llm.engine.scheduler.stats.max_steps_in_flight == 2
            logprobs = [[list(entry) for entry in outputs[1].outputs[0].logprobs or []] for outputs in rounds]
            found.append(([tokens_of(outputs) for outputs in rounds], logprobs, llm.engine.limits))
    assert found[0] == found[1]


def test_a_feature_that_only_the_parent_knows_is_refused(tmp_path: Path) -> None:
    register_feature(FeatureEntry("of this test"))
    try:
        with pytest.raises(ValueError, match="'of this test' is not registered in the worker's process"):
            started(saved(tmp_path, "llama"), in_process=True)
    finally:
        feature_list._registered.clear()


def test_drafts_are_chosen_by_the_costs_that_the_process_measured(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama")
    with started(model, in_process=False) as llm:
        expected = tokens_of(llm.generate([list(p) for p in PROMPTS], PARAMS))
    with started(model, in_process=True, speculative_config=DRAFTS) as llm:
        assert llm.engine.runner.info.drafting.costs.seconds[0] > 0  # type: ignore[attr-defined]
        assert tokens_of(llm.generate([list(p) for p in PROMPTS], PARAMS)) == expected


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"max_model_len": 5000}, ValueError, "exceeds the 256 positions"),
    ({"attention_backend": "triton"}, ValueError, "attention_backend='triton' does not serve"),
    ({"speculative_config": {"method": "eagle3", "model": "no/such folder", "num_speculative_tokens": 2}}, SourceError,
     "neither a local path, nor a hub id"),
])
def test_what_goes_wrong_at_the_start_is_raised_as_it_is(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as found:
        started(saved(tmp_path, "llama"), in_process=True, **settings)
    assert type(found.value) is error


def test_errors_keep_their_type_and_message_without_torch() -> None:
    import torch

    for error, kind in ((SourceError("a"), SourceError), (FileNotFoundError("b"), FileNotFoundError),
                        (torch.OutOfMemoryError("c"), RuntimeError)):
        came = pickle.loads(pickle.dumps(Failure.from_error(error))).to_error()
        assert type(came) is kind and str(came) == str(error)


def test_a_step_that_fails_ends_its_requests_and_not_the_process(tmp_path: Path) -> None:
    with started(saved(tmp_path, "llama"), in_process=True) as llm:
        bad = SamplingParams(temperature=0, allowed_token_ids=[7], bad_words_token_ids=((7,),))
        good, failed = llm.generate([list(PROMPTS[0]), [5, 6]], [greedy(4), bad])
        assert len(good.outputs[0].token_ids) == 4 and "no token is allowed" in (failed.outputs[0].error or "")


def test_a_worker_that_dies_is_the_end_of_all_requests(tmp_path: Path) -> None:
    llm = started(saved(tmp_path, "llama"), in_process=True)
    stream = llm.stream(list(PROMPTS[0]), greedy(50))
    next(stream)
    os.kill(pid_of(llm), signal.SIGKILL)
    with pytest.raises(WorkerDied, match="the worker process died .signal SIGKILL."):
        list(stream)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        llm.generate(list(PROMPTS[0]), greedy(4))
    llm.close()


def test_a_worker_that_dies_is_heard_of_by_every_reader(tmp_path: Path) -> None:
    engine = start_engine(EngineConfig(saved(tmp_path, "llama"), **SETTINGS), in_process=True)

    async def main() -> None:
        async with AsyncLLM.around(engine) as llm:
            streams = [llm.generate(list(prompt), greedy(50)) for prompt in PROMPTS]
            await anext(streams[0])
            os.kill(engine.runner.process_ids[0], signal.SIGKILL)  # type: ignore[attr-defined]
            for stream in streams:
                with pytest.raises(EngineError, match="SIGKILL"):
                    _ = [output async for output in stream]
            assert not llm.is_running

    asyncio.run(asyncio.wait_for(main(), timeout=300))


SLOW_DRAFTER = """
import os, time
from outrider.drafters.base import Drafter
class SlowDrafter(Drafter):
    def __init__(self, num_drafts, target):
        print(os.getpid(), flush=True)
        time.sleep(1000)
"""
PARENT = """
import os, sys, time
from outrider.config import EngineConfig
from outrider.engine.start import start_engine
if __name__ == "__main__":
    config = EngineConfig(sys.argv[1], device="cpu", max_model_len=64, num_pages=64)
    engine = start_engine(config, in_process=True)
    print(engine.runner.process_ids[0], "torch" in sys.modules, flush=True)
    time.sleep(1000)
"""


def test_the_process_ends_with_its_parent_which_never_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), saved(tmp_path, "llama")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, has_torch = parent.stdout.readline().split()
        parent.kill()
    assert has_torch == "False"
    until = time.monotonic() + 200
    while time.monotonic() < until and _is_alive(int(pid)):
        time.sleep(0.05)
    assert not _is_alive(int(pid))


LOADING_PARENT = """
import signal
import sys
from outrider.config import EngineConfig
from outrider.engine.start import start_engine
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that a shell runs in the background ignore it
    drafts = {"method": "slow_drafter:SlowDrafter", "num_speculative_tokens": 1}
    start_engine(EngineConfig(sys.argv[1], device="cpu", max_model_len=64, num_pages=64, speculative_config=drafts),
                 in_process=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_loads_a_model_ends_with_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    """To load a large model takes minutes, in which nobody reads the pipe."""
    (tmp_path / "slow_drafter.py").write_text(SLOW_DRAFTER)
    (tmp_path / "parent.py").write_text(LOADING_PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), saved(tmp_path, "llama")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(number)
    until = time.monotonic() + 200
    while time.monotonic() < until and _is_alive(pid):
        time.sleep(0.05)
    assert not _is_alive(pid)


def test_sigterm_to_the_whole_group_is_the_parents(tmp_path: Path) -> None:
    with started(saved(tmp_path, "llama"), in_process=True) as llm:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid_of(llm), number)
            assert llm.generate([[5, 6]], greedy(3))[0].outputs[0].token_ids


def test_a_process_ends_with_a_parent_that_does_not_close_it(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT.replace("time.sleep(1000)", "pass"))
    command = [sys.executable, str(tmp_path / "parent.py"), saved(tmp_path, "llama")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert not _is_alive(int(done.stdout.split()[0]))


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_the_process_logs_through_its_parent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider"):
        started(saved(tmp_path, "llama"), in_process=True).close()
    assert "start-up: " in caplog.text and "pages of" in caplog.text


class SubmitTracer(Tracer):
    """Counts the lines that submit a step only."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        is_submit = frame.f_code in (WorkerProcess.submit.__code__, WorkerProcess._send.__code__)
        return super().__call__(frame, event, arg) if is_submit else self


def test_an_interrupt_on_any_line_of_a_submit_leaves_no_answer_to_a_wrong_step(tmp_path: Path) -> None:
    """Where a part of the batch may be on its way, the worker ends and says so."""
    with started(saved(tmp_path, "llama"), in_process=True) as llm:
        def generate() -> Any:
            return tokens_of(llm.generate([list(p) for p in PROMPTS], PARAMS, use_tqdm=False))

        expected = generate()
        with traced(SubmitTracer()) as tracer:
            assert generate() == expected
        num_landed, sending = 0, False
        for line in range(1, tracer.count):
            try:
                with traced(SubmitTracer(line)):
                    generate()
            except KeyboardInterrupt:
                num_landed += 1
            sending = llm.engine.runner._is_sending  # type: ignore[attr-defined]
            if sending:
                break
            assert generate() == expected, line
        assert num_landed >= 5 and sending
        with pytest.raises(WorkerDied, match="an interrupt .KeyboardInterrupt. cut off a message"):
            generate()
