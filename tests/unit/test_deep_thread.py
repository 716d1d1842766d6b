"""A process that ends while a grammar is compiled: the interpreter would stop that thread in the middle of its work."""

from __future__ import annotations

import subprocess
import sys
import time

BEGIN = """
import time
from outrider.core.deep_thread import end_process, run_deep

def work():
    time.sleep({seconds})
    print("done", flush=True)

try:
    run_deep(work, 0.01)
except TimeoutError:
    print("late")
"""


def run(program: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_program_waits_for_what_it_left_to_itself() -> None:
    assert run(BEGIN.format(seconds=1)) == (0, "late\ndone\n")


def test_a_process_that_is_ended_has_its_status_and_all_of_its_output() -> None:
    began = time.monotonic()
    assert run(BEGIN.format(seconds=250) + "end_process(3)") == (3, "late\n")
    assert time.monotonic() - began < 200
    assert run(BEGIN.format(seconds=0).replace("0.01", "100") + "end_process(3)\nprint('more')") == (0, "done\nmore\n")
