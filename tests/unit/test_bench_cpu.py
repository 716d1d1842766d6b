"""`outrider bench cpu` beside programs that stand for llama.cpp's: what they are asked, what is read, what is said."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from outrider import cli
from outrider.benchmarks import busy_time
from outrider.benchmarks.busy_time import Mark, Span
from outrider.benchmarks.cpu_engines import Case, EngineFails, LlamaEngine
from tests.models.gguf_files import FAMILIES, write

SIZES = ["--requests", "1,3", "--contexts", "0,40", "--prompts", "40,50", "--new-tokens", "4", "--rounds", "2"]
# Prints the row of llama-batched-bench after 0.3 s of work, as if 0.2 s of them had been the decode steps.
TOOL = """#!{python}
import sys, time
asked = dict(zip(sys.argv[1:], sys.argv[2:]))
with open({log!r}, "a") as log:
    print(sys.argv[1:], file=log)
begin = time.perf_counter()
while time.perf_counter() - begin < 0.3:
    pass
print("llama_context: n_ctx = 512")
print("|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |")
print("|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|")
pp, tg, pl = (int(asked[name]) for name in ("-npp", "-ntg", "-npl"))
print(f"|{{pp:6d}} | {{tg:6d}} | {{pl:4d}} | {{pp + pl * tg:6d}} | {{0.1:8.3f}} | {{pp / 0.1:8.2f}} | {{0.2:8.3f}} |"
      f" {{pl * tg / 0.2:8.2f}} | {{0.3:8.3f}} | {{1.0:8.2f}} |", flush=True)
time.sleep(0.1)
"""
BROKEN = "#!/bin/sh\necho 'error loading model: unknown model architecture'\necho goodbye\nexit 1\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    written = FAMILIES["llama"]
    return write(path / "tiny.gguf", written.checkpoint(path / "checkpoint"), written)


def built(folder: Path, script: str) -> Path:
    tool = folder / "build" / "bin" / "llama-batched-bench"
    tool.parent.mkdir(parents=True)
    tool.write_text(script)
    tool.chmod(0o755)
    return folder


def working(folder: Path) -> Path:
    return built(folder, TOOL.format(python=sys.executable, log=str(folder / "log")))


def test_every_case_is_measured_in_turns_and_compared(model: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    folder, result = working(tmp_path / "llama"), tmp_path / "result.json"
    given = ["bench", "cpu", model, "--llama", folder, *SIZES, "--threads", "1", "--save-result", result]
    assert cli.main([str(word) for word in given]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert json.loads(result.read_text()) == report and report["threads"] == 1
    speeds = {row["case"]: row["engines"]["llama.cpp"]["tok_s"] for row in report["results"]}
    assert {case: round(speed, 3) for case, speed in speeds.items()} == {
        "1 request behind 0 tokens": 20, "1 request behind 40 tokens": 20, "3 requests behind 0 tokens": 60,
        "3 requests behind 40 tokens": 60, "prompt of 40 tokens": 400, "prompt of 50 tokens": 500,
    }
    for row in report["results"]:
        assert set(row["engines"]) == {"outrider", "outrider, 8-bit rows", "llama.cpp"}
        for name, (by_clock, _) in row["ratios"].items():
            assert by_clock == pytest.approx(row["engines"][name]["tok_s"] / speeds[row["case"]])
        if sys.platform == "linux":
            assert all(engine["processor_ms"] is not None for engine in row["engines"].values())
    asked = (folder / "log").read_text().splitlines()
    assert len(asked) == 2 * 5  # two rounds of five cases: the prompt of 40 tokens is that of a context
    assert sum("'-npl', '3'" in line for line in asked) == 4
    assert sum("'-npl', '3', '-t', '1', '-pps'" in line for line in asked) == 2  # behind 40 tokens


def test_processor_time_is_that_of_the_measured_part(tmp_path: Path) -> None:
    engine = LlamaEngine("llama.cpp", str(working(tmp_path / "llama")), Path("model.gguf"), threads=1)
    measured = engine.measure(Case(40, 1, 4))
    assert (measured.prompt.wall, measured.decode.wall) == pytest.approx((0.1, 0.2))
    if sys.platform == "linux":
        assert measured.prompt.own is not None and measured.decode.own is not None
        assert measured.prompt.own <= 0.2 and measured.decode.own <= 0.3  # one thread, and the clock's grain


def test_an_engine_that_cannot_run_a_model_is_left_out(model: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    broken, folder = built(tmp_path / "ik", BROKEN), working(tmp_path / "llama")
    with pytest.raises(EngineFails, match="unknown model architecture"):
        LlamaEngine("ik_llama.cpp", str(broken), model, threads=1).measure(Case(0, 1, 4))
    sizes = ["--requests", "1", "--contexts", "0", "--prompts", "20", "--new-tokens", "4", "--rounds", "1"]
    given = ["bench", "cpu", model, "--llama", folder, "--ik", broken, *sizes, "--activation-bits", "32"]
    assert cli.main([str(word) for word in given]) == 0
    out, err = capsys.readouterr()
    said = "ik_llama.cpp is left out here: error loading model: unknown model architecture"
    assert err.count(said) == 2  # once for each case
    assert all(set(row["engines"]) == {"outrider", "llama.cpp"} for row in
               json.loads(out.splitlines()[-1])["results"])


def test_a_folder_without_the_tool_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "cpu", "model.gguf", "--ik", str(tmp_path)]) == 2
    assert "has no llama-batched-bench: name a folder" in " ".join(capsys.readouterr().err.split())


def test_what_other_programs_used_is_a_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    first, last = Mark(10.0, 1.0, 100.0), Mark(12.0, 3.0, 106.0)
    assert Span.between(first, last) == Span(2.0, 2.0, 0.5)
    middle = first.towards(last, 10.5)
    assert middle == Mark(10.5, 1.5, 101.5) and Span.between(middle, last) == Span(1.5, 1.5, 0.5)
    assert Span.between(Mark(0.0, None, None), Mark(1.0, None, None)) == Span(1.0, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_marks_of_this_process_are_the_same_from_inside_and_from_outside() -> None:
    inside, outside = busy_time.mark_own(), busy_time.mark_process(os.getpid())
    assert inside.own is not None and outside.own == pytest.approx(inside.own, abs=0.1)
    assert outside.everyone is not None and outside.everyone >= inside.own
    assert busy_time.mark_process(2**22 + 1).own is None
