"""The command `python -m outrider.compat script.py ...`, which runs a script written for vLLM without changes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from outrider.compat.alias import install_as_vllm


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m outrider.compat SCRIPT [ARGUMENTS]: run a script written for vLLM")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as for `python script.py`
    install_as_vllm()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
