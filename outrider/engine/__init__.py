"""The loop, the life of a request, text in and out."""

from pathlib import Path

# Modules of vLLM's package of this name are found behind those of this folder; see compat/__init__.py.
__path__.append(str(Path(__file__).parents[1] / "compat" / "modules" / "engine"))
