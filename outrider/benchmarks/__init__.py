"""The benchmarks of `outrider bench KIND`: one file for each kind, with `run(args) -> status`, and shared parts."""

from pathlib import Path

# Modules of vLLM's package of this name are found behind those of this folder; see compat/__init__.py.
__path__.append(str(Path(__file__).parents[1] / "compat" / "modules" / "benchmarks"))
