"""A run that was killed goes on where its last checkpoint was, and ends with the weights of a run that was not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.training.checkpoint import TrainingCheckpoint
from outrider.training.texts import TextStore, TrainingText
from outrider.training.workspace import MODEL_FILES, Workspace, digest_model, replace_file, write_text
from tests.training.runs import train

RUN: dict[str, Any] = {"passes": 2, "epochs": 3, "evaluations": 3}


class Killed(BaseException):
    """Raised where a process would be killed: no handler of the package takes it."""


def kill_at(words: str) -> Callable[[str], None]:
    def report(line: str) -> None:
        if words in line:
            raise Killed

    return report


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **RUN)
    # Killed while texts are generated, again after the first evaluation, and again after the second one.
    for words in ("texts 24", "held out after step 2", "held out after step 4"):
        with pytest.raises(Killed):
            train(tmp_path / "killed", report=kill_at(words), **RUN)
    lines: list[str] = []
    resumed = train(tmp_path / "killed", report=lines.append, **RUN)
    assert any("resumed after step 3" in line for line in lines)
    assert resumed.evaluations == whole.evaluations and resumed.num_steps == whole.num_steps == 6
    for name in ("model.safetensors", "training/checkpoint.safetensors"):
        one, two = (load_file(tmp_path / run / name) for run in ("whole", "killed"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), name


def test_a_finished_run_is_exported_again_without_training(tmp_path: Path) -> None:
    train(tmp_path / "head", **RUN)
    before = load_file(tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "model.safetensors").unlink()
    lines: list[str] = []
    train(tmp_path / "head", report=lines.append, **RUN | {"file_form": "speculators"})
    assert not any(line.startswith("step ") for line in lines)
    after = load_file(tmp_path / "head" / "model.safetensors")
    assert after.keys() == {name.replace("midlayer.", "layers.0.") for name in before}


def test_texts_that_were_copied_to_another_folder_are_trained_on(tmp_path: Path) -> None:
    """So that a run on another machine generates nothing."""
    run = RUN | {"epochs": 1, "evaluations": 1}
    whole, lines = train(tmp_path / "whole", **run), list[str]()
    shutil.copytree(tmp_path / "whole" / "training", tmp_path / "copied" / "training",
                    ignore=lambda _, names: [name for name in names if not name.startswith("texts-")])
    Workspace(tmp_path / "copied").check_empty(resume=True)
    copied = train(tmp_path / "copied", report=lines.append, **run)
    assert not any(line.startswith(("generating", "texts ")) for line in lines)
    assert copied.evaluations == whole.evaluations


def test_other_settings_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "head", **RUN)
    with pytest.raises(ValueError, match="passes was 2 and is 3"):
        train(tmp_path / "head", **RUN | {"passes": 3})
    with pytest.raises(ValueError, match="prompts was .* and is "):
        train(tmp_path / "head", num_prompts=23, **RUN | {"num_texts": 24})
    monkeypatch.setattr("outrider.training.run.digest_model", lambda path: f"that of other files in {path}")
    with pytest.raises(ValueError, match="begun with another model under the name target"):
        train(tmp_path / "head", **RUN)


def test_another_model_under_the_same_name_is_refused(tmp_path: Path) -> None:
    """The texts and the head of a run belong to the weights that it began with."""
    folder, workspace = tmp_path / "model", Workspace(tmp_path / "head")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = torch.randn(40_000)
    save_file({"w": weights}, folder / "model.safetensors")

    def open_run() -> None:
        workspace.open({"model": "model", MODEL_FILES: digest_model(folder)})

    open_run()
    open_run()
    save_file({"w": weights + 1e-3}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="begun with another model under the name model"):
        open_run()
    save_file({"w": weights}, folder / "model.safetensors")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="begun with another model"):
        open_run()
    write_text(workspace.inner / "settings.json", '{"model": "model"}')  # of a run that noted the name alone
    open_run()


def test_a_write_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path)
    workspace.open({})
    weights = {"w": torch.ones(3)}
    TrainingCheckpoint(1, weights, {}, {}).write(workspace.checkpoint)

    def full_disk(*args: object, **kwargs: object) -> None:
        Path(str(args[1])).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.training.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        TrainingCheckpoint(2, weights, {}, {}).write(workspace.checkpoint)
    assert TrainingCheckpoint.read(workspace.checkpoint).step == 1
    assert [path.name for path in workspace.inner.iterdir() if "part" in path.name] == []


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        TrainingCheckpoint.read(tmp_path / "checkpoint.safetensors")


def test_a_damaged_file_of_the_run_is_named(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.open({})
    (workspace.inner / "settings.json").write_text("")
    with pytest.raises(ValueError, match=r"settings\.json does not hold the settings of a run"):
        workspace.open({})
    TextStore(tmp_path).shard_path(0).write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"texts-00000\.safetensors is damaged .*: delete it and run again with"):
        TextStore(tmp_path).read_all()


def test_files_of_a_drafter_can_be_read_by_those_who_may_read_new_files(tmp_path: Path) -> None:
    """A server often runs as another user than the one that trained the drafter."""
    (tmp_path / "new").touch()
    TextStore(tmp_path).write(0, [TrainingText((1, 2, 3), 1, True)])
    write_text(tmp_path / "notes.txt", "")
    modes = {(tmp_path / name).stat().st_mode for name in ("new", "notes.txt", "texts-00000.safetensors")}
    assert len(modes) == 1


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    def full_disk(path: Path) -> None:
        raise SafetensorError("No space left on device")

    with pytest.raises(OSError, match=r"model\.safetensors cannot be written: No space left .* --resume goes on"):
        replace_file(tmp_path / "model.safetensors", full_disk)
    assert not list(tmp_path.iterdir())
