"""docs/api.md is what its script makes of the docstrings."""

from __future__ import annotations

import runpy
from pathlib import Path

import outrider

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_api.py"))["reference"]()
    assert (DOCS / "api.md").read_text() == made, "python docs/make_api.py writes it anew"


def test_every_public_class_is_in_it() -> None:
    text = (DOCS / "api.md").read_text()
    assert all(f"## `{name}" in text for name in outrider.__all__ if name[0].isupper())
