"""`make bench-track` fails where a figure is worse than the last accepted one by more than its noise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.track import FIGURES, Figure, last_accepted, track, worse

BASE = {"one_request": 100.0, "eight_requests": 400.0, "prompt": 1000.0, "start_up": 2.0, "host_step_256": 700.0}


def run_of(file: Path, **changed: float) -> int:
    return track(BASE | changed, "a machine", file)


@pytest.mark.parametrize("figure", FIGURES, ids=[figure.name for figure in FIGURES])
def test_a_figure_may_be_worse_by_its_noise_and_not_by_more(figure: Figure) -> None:
    direction = -1 if figure.is_better_higher else 1
    for share, is_worse in ((0.9, False), (1.1, True), (-3, False)):
        now = BASE[figure.name] * (1 + direction * share * figure.noise)
        lines = worse(BASE | {figure.name: now}, BASE)
        assert [line.split(":")[0] for line in lines] == ([figure.name] if is_worse else [])


def test_a_worse_run_fails_and_is_not_compared_with_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "track.jsonl"
    assert run_of(file) == 0
    assert run_of(file, prompt=800.0) == 1
    assert "worse: prompt: 800 tok/s, before 1000 (-20%, noise 10%)" in capsys.readouterr().out
    assert run_of(file, prompt=800.0) == 1, "still worse than the first run"
    assert run_of(file) == 0
    assert [json.loads(line)["is_accepted"] for line in file.read_text().splitlines()] == [True, False, False, True]


def test_accepted_figures_are_the_next_ones_to_compare_with(tmp_path: Path) -> None:
    file = tmp_path / "track.jsonl"
    assert run_of(file) == 0
    assert track(BASE | {"prompt": 800.0}, "a machine", file, accept=True) == 0
    assert run_of(file, prompt=800.0) == 0


def test_figures_of_another_machine_are_not_compared(tmp_path: Path) -> None:
    file = tmp_path / "track.jsonl"
    assert track({name: 1e-9 for name in BASE}, "another", file) == 0
    assert run_of(file) == 0
    assert last_accepted(file.read_text().splitlines(), "a third") is None


def test_a_figure_that_is_new_has_nothing_to_compare_with() -> None:
    assert worse(BASE, {name: value for name, value in BASE.items() if name != "prompt"}) == []
