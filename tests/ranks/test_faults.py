"""Ranks that die, hang, are stopped or behave differently: requests end with an answer that names the rank, in bounded
time, and no process is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.engine import rank_watch
from outrider.runner.interface import WorkerDied
from tests.engine.harness import CONFIGS, greedy, save_folder, tokens_of
from tests.ranks.commands import BreakStep, Refuse, RowDigests
from tests.ranks.test_engine import PROMPTS, model_at, process_ids, short_texts_of, started, texts_of, wait_for_end

pytestmark = pytest.mark.long
OWN_DRAFTS = {"method": "tests.ranks.own_code:RankDrafter", "num_speculative_tokens": 3, "auto": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_at(tmp_path_factory.mktemp("ranks"))


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the parent gives ranks up sooner. A start may take longer on a machine that others use."""
    monkeypatch.setattr(rank_watch, "SILENT_SECONDS", 5.0)
    monkeypatch.setattr(rank_watch, "STUCK_SECONDS", 8.0)
    monkeypatch.setattr(rank_watch, "STRAGGLER_SECONDS", 3.0)


@pytest.mark.parametrize(("how", "rank", "words"), [
    ("stop", 1, r"rank 1 \(process \d+\) .* has shown no life"),
    ("stop", 0, r"rank 0 \(process \d+\) .* has shown no life"),
    ("hang", 1, r"nothing has moved for \d+ s: rank 1 \(process \d+\) ran step \d+$"),
    ("raise", 1, r"rank 1 failed in step or command \d+, .*: ValueError: a fault of this test"),
    ("raise", 0, r"rank 0 failed in step or command \d+, .*: ValueError: a fault of this test"),
    ("die", 0, r"rank 0 died when it .* .signal SIGKILL."),
])
def test_a_rank_that_breaks_a_step_is_named(model: str, monkeypatch: pytest.MonkeyPatch, how: str, rank: int,
                                            words: str) -> None:
    with started(model, 2) as llm:
        hurry(monkeypatch)
        pids = process_ids(llm)
        llm.engine.command(BreakStep(how, ranks=(rank,), countdown=3))
        with pytest.raises(WorkerDied, match=words):
            texts_of(llm)
        wait_for_end(pids)


def test_a_command_that_one_rank_refuses_ends_all(model: str) -> None:
    with started(model, 2) as llm:
        with pytest.raises(WorkerDied, match="rank 1 failed in .* refused by rank 1"):
            llm.engine.command(Refuse(ranks=(1,)))
        wait_for_end(process_ids(llm))


def test_a_rank_that_cannot_start_is_named(model: str) -> None:
    drafts = OWN_DRAFTS | {"method": "tests.ranks.own_code:NoDrafterOnRank1"}
    begin = time.monotonic()
    with pytest.raises(ValueError, match="^rank 1: speculative_config: .*weights.bin is missing"):
        started(model, 2, speculative_config=drafts)
    assert time.monotonic() - begin < 200
    with pytest.raises(ValueError, match="^[^:]*config.json: num_attention_heads is 4, which 3 ranks cannot share"):
        started(model, 3)


PARENT = """
import sys, time
from tests.ranks.test_engine import process_ids, started, texts_of
if __name__ == "__main__":
    llm = started(sys.argv[1], 2)
    print(*process_ids(llm), flush=True)
    while True:
        texts_of(llm)
"""


def test_ranks_end_with_their_parent(model: str, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), model], stdout=subprocess.PIPE, text=True,
                          env=environment) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        time.sleep(1)
        os.kill(pids[1], signal.SIGSTOP)  # it cannot see the end of its parent
        parent.kill()
    assert len(pids) == 2
    wait_for_end(pids)


def test_drafts_and_tokens_of_a_users_code_are_those_of_rank_0(model: str) -> None:
    found = []
    for num_ranks in (1, 2):
        with started(model, num_ranks, speculative_config=OWN_DRAFTS) as llm:
            found.append((texts_of(llm), llm.engine.stats.num_accepted_tokens, llm.engine.stats.drafter_faults))
            digests = llm.engine.command(RowDigests())
            assert len(set(digests)) == 1 and len(digests) == num_ranks
    assert found[0] == found[1] and found[0][1] > 0
    found = []
    for num_ranks in (1, 2):
        with started(model, num_ranks, logits_processors=("tests.ranks.own_code:RankProcessor",)) as llm:
            found.append(texts_of(llm))
            assert len(set(llm.engine.command(RowDigests()))) == 1
    assert found[0] == found[1]


def test_weights_reach_both_ranks(model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = CONFIGS["llama"] | {"vocab_size": 259, "eos_token_id": 257}
    other = save_folder(tmp_path / "other", config, seed=8)
    with started(model, 1) as llm:
        expected = short_texts_of(llm)
        llm.update_weights(other)
        theirs = short_texts_of(llm)
    assert expected != theirs
    with started(model, 2) as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert short_texts_of(llm) == expected
        with pytest.raises(ValueError, match="no weights of these names"):
            llm.update_weights([("nothing.weight", load_file(other / "model.safetensors")["model.norm.weight"])])
        llm.update_weights(load_file(other / "model.safetensors"))
        assert short_texts_of(llm) == theirs
        llm.update_weights(model)
        assert short_texts_of(llm) == expected


class Storm:
    """An engine of two ranks that is broken at random, checked and started again where it must be."""

    def __init__(self, model: str, seed: int) -> None:
        self._model, self._random = model, random.Random(seed)
        self._llm: LLM | None = None
        self.num_ends = 0
        self._expected: Any = None

    def run(self, num_faults: int) -> None:
        for number in range(num_faults):
            llm = self._llm = self._llm or started(self._model, 2)
            self._expected = self._expected or short_texts_of(llm)
            kind = self._random.choices(["both", "refused", "aborted", "one", "killed", "stopped"],
                                        [8, 4, 4, 1, 2, 1])[0]
            pids = process_ids(llm)
            try:
                self._break(llm, kind)
                assert kind in ("both", "refused", "aborted"), (number, kind)
                assert short_texts_of(llm) == self._expected, (number, kind)
                assert len(set(llm.engine.command(RowDigests()))) == 1
            except WorkerDied as error:
                assert kind in ("one", "killed", "stopped") and "rank" in str(error), (number, kind, error)
                llm.close()
                wait_for_end(pids)
                self._llm, self.num_ends = None, self.num_ends + 1
        if self._llm is not None:
            self._llm.close()

    def _break(self, llm: LLM, kind: str) -> None:
        rank, countdown = self._random.randrange(2), self._random.randrange(12)
        match kind:
            case "both":
                llm.engine.command(BreakStep("raise", (0, 1), countdown))
            case "refused":
                with pytest.raises(ValueError, match="refused"):
                    llm.engine.command(Refuse((0, 1)))
            case "aborted":
                for _ in zip(range(countdown + 1), llm.stream(list(PROMPTS[0]), greedy(30)), strict=False):
                    pass
            case "one":
                llm.engine.command(BreakStep("raise", (rank,), countdown % 4))
            case "killed":
                stream = llm.stream(list(PROMPTS[0]), greedy(30))
                next(stream)
                os.kill(process_ids(llm)[rank], signal.SIGKILL)
                list(stream)
            case "stopped":
                os.kill(process_ids(llm)[rank], signal.SIGSTOP)
        tokens_of(llm.generate([list(PROMPTS[2])], SamplingParams(max_tokens=12, seed=countdown), use_tqdm=False))


def test_200_random_faults(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "SILENT_SECONDS", 20.0)
    monkeypatch.setattr(rank_watch, "STRAGGLER_SECONDS", 5.0)
    storm = Storm(model, seed=11)
    storm.run(int(os.environ.get("OUTRIDER_RANK_FAULTS", "200")))
    assert storm.num_ends > 0
