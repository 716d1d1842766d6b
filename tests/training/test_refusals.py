"""Bad input to `outrider train-drafter` gets one clear line, before the model is loaded where that is possible."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from outrider import cli
from outrider.commands.loading import Loaded
from outrider.config import EngineConfig
from outrider.training.run import train_drafter
from outrider.training.settings import TrainingSettings
from outrider.training.texts import SplitTexts, TrainingText
from outrider.training.workspace import Workspace
from tests.engine.harness import tiny_model
from tests.training.runs import ASSETS, SMALL, engine_config, loaded, prompts_of, train, write_prompts

TARGET = ASSETS / "target"


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    status = cli.main(["train-drafter", *map(str, words)])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert status == 2 and len(lines) == 1, lines
    return lines[0]


def test_flags_that_cannot_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ("--out", tmp_path / "head")
    assert "--out" in refused(capsys, TARGET)
    assert "'medusa' is not one of eagle3" in refused(capsys, TARGET, *out, "--method", "medusa")
    assert "too short for 9 drafts: lower passes" in refused(
        capsys, TARGET, *out, "--passes", 9, "--max-answer-tokens", 8)
    assert "passes must be" in refused(capsys, TARGET, *out, "--passes", 99)
    assert "an integer from 0 to 4096, got 5000" in refused(capsys, TARGET, *out, "--markov-rank", 5000)
    assert "an integer from 1 to 262144, got 1000000" in refused(capsys, TARGET, *out, "--intermediate-size", 10**6)
    assert "raise --micro-tokens" in refused(capsys, TARGET, *out, "--markov-rank", 0, "--micro-tokens", 64)
    for method, flags, names in (
        ("eagle3", ("--layers", 2, "--markov-rank", 4), "--layers, --markov-rank"),
        ("block", ("--classic",), "--classic"),
        ("mtp", ("--taps", "1,2", "--freeze-output", "--file-form", "speculators", "--intermediate-size", 64),
         "--taps, --intermediate-size, --freeze-output, --file-form"),
    ):
        assert f"method '{method}' does not read {names}: leave" in refused(
            capsys, TARGET, *out, "--method", method, *flags)
    assert "raise --micro-tokens" in refused(capsys, TARGET, *out, "--micro-tokens", 64)
    assert "there is no file" in refused(capsys, TARGET, *out, "--prompts", tmp_path / "nothing.txt")
    assert "train-drafter` has no flag --speculative-config" in refused(
        capsys, TARGET, *out, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    assert not (tmp_path / "head").exists()


def test_a_folder_that_is_not_empty(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty: name another folder" in refused(capsys, TARGET, "--out", tmp_path)
    Workspace(tmp_path).open({})
    assert "--resume goes on with it; to begin anew, name another folder" in refused(capsys, TARGET, "--out", tmp_path)
    for path in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "head"):
        assert "notes.txt is not a folder" in refused(capsys, TARGET, "--out", path)


def test_resume_does_not_write_into_a_folder_that_holds_no_run(capsys: pytest.CaptureFixture[str],
                                                               tmp_path: Path) -> None:
    """Another model's files would be replaced. An empty inner folder is what a run that was killed at once leaves."""
    (tmp_path / "config.json").write_text("{}")
    assert "holds no run that could be resumed" in refused(capsys, TARGET, "--out", tmp_path, "--resume")
    (tmp_path / "training").mkdir()
    assert "holds no run that could be resumed" in refused(capsys, TARGET, "--out", tmp_path, "--resume")
    (tmp_path / "config.json").unlink()
    Workspace(tmp_path).check_empty(resume=True)
    with pytest.raises(ValueError, match="is not empty: name another"):
        Workspace(tmp_path).check_empty(resume=False)


def test_a_target_without_the_taps(tmp_path: Path) -> None:
    """The usual three need three layers at least; a number beyond the layers is no tap."""
    with pytest.raises(ValueError, match="the target has 4 layers, so taps must be from 0"):
        train(tmp_path / "head", taps=(1, 5))
    shallow = Loaded("shallow", tiny_model("llama"), None, ())
    with pytest.raises(ValueError, match=r"has 2 layers and not the three residual streams.*--taps"):
        train_drafter(shallow, EngineConfig("shallow"), TrainingSettings(**SMALL | {"taps": ()}),
                      Workspace(tmp_path / "head"))
    assert not (tmp_path / "head").exists()


def test_texts_longer_than_the_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--max-prompt-tokens \+ .* need .* positions, and .* has 512"):
        train(tmp_path / "head", max_prompt_tokens=256, max_answer_tokens=256, micro_tokens=1024)


def test_too_little_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 1))
    with pytest.raises(ValueError, match=r" GiB are needed for the texts of this run, and .* has 0.00 GiB free"):
        train(tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    def read(name: str, content: str) -> None:
        (tmp_path / name).write_text(content)
        train_drafter(loaded("target"), engine_config("target"), TrainingSettings(**SMALL),
                      Workspace(tmp_path / "head"), prompts_file=tmp_path / name)

    for name, content, words in (
        ("a.jsonl", '{"prompt_token_ids": [1, 2]}\n{"answer": "x"}', r"line 2 must be a text, or an object"),
        ("a.jsonl", '{"prompt_token_ids": [128]}', "token ids below 128"),
        ("a.jsonl", '{"prompt_token_ids": [1, true]}', "line 1: prompt_token_ids must be token ids"),
        ("a.jsonl", "{", "line 1 is not valid JSON"),
        ("a.json", '{"prompt": "x"}', "must hold a list"),
        ("a.txt", "Hello", "the model has no tokenizer files"),
        ("a.txt", "\n", "it has no prompt"),
        ("a.jsonl", json.dumps({"prompt_token_ids": [1] * 40}), "longer than 24 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            read(name, content)


def test_too_few_texts_to_hold_any_out(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", prompts_of("target", 1))
    with pytest.raises(ValueError, match="are too few: raise --num-texts"):
        train_drafter(loaded("target"), engine_config("target"), TrainingSettings(**SMALL),
                      Workspace(tmp_path / "head"), prompts_file=prompts)


def test_held_out_answers_that_are_too_short_to_measure_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that was measured at no place would be chosen by nothing."""
    monkeypatch.setattr("outrider.training.run.split_texts", lambda texts, share: SplitTexts(
        texts, [TrainingText(text.tokens[: text.answer_from + 3], text.answer_from, True) for text in texts]))
    with pytest.raises(ValueError, match="too short to measure 4 drafts with: lower --passes"):
        train(tmp_path / "head", num_prompts=3, max_answer_tokens=5)
