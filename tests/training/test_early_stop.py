"""When a run ends early, and which weights it keeps; and the dtypes of targets that it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.training.loss import HeldOutAcceptance
from outrider.training.run import train_drafter
from outrider.training.settings import TrainingSettings
from outrider.training.trainer import Trainer
from outrider.training.workspace import Workspace
from tests.training.runs import SMALL, engine_config, loaded, prompts_of, train, write_prompts


def steps_of(folder: Path, accepted: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(steps, best step) of a run of 6 steps whose every measurement is the same: accepted of 100 places."""
    monkeypatch.setattr(Trainer, "measure", lambda self: HeldOutAcceptance(100, (accepted,)))
    done = train(folder, passes=1, epochs=3, evaluations=6, patience=1)
    return done.num_steps, done.best.step


def test_a_run_ends_early_where_acceptance_no_longer_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_of(tmp_path / "head", 50, monkeypatch) == (2, 2)


def test_a_run_does_not_end_before_drafts_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance rises long after the loss begins to fall. Of equal weights the last are the best trained."""
    assert steps_of(tmp_path / "head", 3, monkeypatch) == (6, 6)


@pytest.mark.parametrize("method", ["eagle3", "block"])
def test_a_target_in_float64(method: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", prompts_of("target", 4))
    settings = SMALL | {"method": method, "max_answer_tokens": 8, "passes": 2, "epochs": 1}
    lines: list[str] = []
    done = train_drafter(loaded("target", torch.float64), engine_config("target", dtype="float64"),
                         TrainingSettings(**settings), Workspace(tmp_path / "head"), prompts_file=prompts,
                         report=lines.append)
    assert done.num_steps == 1 and (tmp_path / "head" / "config.json").exists()
    assert any("1 steps are few" in line and "--batch-tokens" in line for line in lines)
