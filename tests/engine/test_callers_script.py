"""Processes of an engine import the script of the caller, wherever it comes from, or say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine.rank_watch import RankProcess, death_of
from outrider.engine.script_import import UNGUARDED, UNGUARDED_ADVICE
from outrider.runner.rank_status import STATUS_FIELDS, RankStatus
from tests.engine.harness import CONFIGS, save_folder

# As an engine starts a process: what it is sent is checked, and making an engine asks whether the script is imported.
STARTS = """
import sys
from outrider.engine.script_import import end_if_importing_script
from outrider.engine.spawned import check_sent, spawn_process
from outrider.logits_processors import LogitsProcessor

class Own(LogitsProcessor):
    pass

def main(sent):
    end_if_importing_script()
    check_sent(sent)
    process = spawn_process(print, ("the child has", sent), name="child")
    process.join()
    sys.exit(process.exitcode)
"""
GUARDED = "if __name__ == '__main__':\n    main({0})"
UNGUARDED_CALL = "main({0})"


def run(*words: str, text: str = "") -> tuple[int, str]:
    done = subprocess.run([sys.executable, *words], input=text, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("call", [GUARDED, UNGUARDED_CALL], ids=["guarded", "unguarded"])
def test_a_script_without_a_file_starts_processes(call: str) -> None:
    script = STARTS + call.format(7)
    assert run("-", text=script) == (0, "the child has 7\n")
    assert run("-c", script) == (0, "the child has 7\n")


def test_classes_of_a_script_without_a_file_are_refused() -> None:
    for words, text in ((("-",), STARTS + GUARDED.format("Own")), (("-c", STARTS + GUARDED.format("Own")), "")):
        code, said = run(*words, text=text)
        assert code == 1 and "Own was defined in a shell, a notebook or on standard input, where the proc" in said


def test_a_script_in_a_file_is_imported_by_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS + GUARDED.format("Own"))
    code, said = run(str(script))
    assert code == 0 and said.startswith("the child has <class '__mp_main__.Own'>")


def test_a_script_that_makes_an_engine_while_it_is_imported_ends_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS + UNGUARDED_CALL.format(7))
    assert run(str(script)) == (UNGUARDED, "")


def test_processes_of_a_script_for_vllm_find_the_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from vllm import SamplingParams\n" + STARTS + GUARDED.format("SamplingParams(max_tokens=3)"))
    code, said = run("-m", "outrider.compat", str(script))
    assert code == 0 and said.startswith("the child has SamplingParams(n=1, ")


def test_the_parent_says_what_to_do() -> None:
    class Process:
        exitcode = UNGUARDED

    own = RankProcess(0, Process(), RankStatus([0] * STATUS_FIELDS))  # type: ignore[arg-type]
    assert str(death_of(own, 2)) == UNGUARDED_ADVICE


@pytest.mark.long
def test_ranks_run_a_script_from_standard_input(tmp_path: Path) -> None:
    """Long: two processes import torch."""
    folder = save_folder(tmp_path / "model", CONFIGS["llama"], seed=3)
    script = ("from outrider import LLM\n"
              f"with LLM({str(folder)!r}, tensor_parallel_size=2, device='cpu', num_pages=64, max_num_seqs=2, "
              "max_model_len=64, skip_tokenizer_init=True) as llm:\n"
              "    print('tokens', len(llm.generate({'prompt_token_ids': [5, 6]})[0].outputs[0].token_ids))\n\n")
    code, said = run("-", text=script)
    assert code == 0 and "tokens " in said
    (tmp_path / "script.py").write_text(script)
    code, said = run(str(tmp_path / "script.py"))
    assert code == 1 and said.rstrip().endswith(UNGUARDED_ADVICE)
