"""docs/api.md is what its script makes of the docstrings."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import outrider
from outrider.config import SpeculativeConfig
from outrider.core.outputs import RequestMetrics

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_api.py"))["reference"]()
    assert (DOCS / "api.md").read_text() == made, "python docs/make_api.py writes it anew"


def test_it_leaves_out_what_only_the_engine_uses_and_nothing_else() -> None:
    script = runpy.run_path(str(DOCS / "make_api.py"))
    text = (DOCS / "api.md").read_text()
    for name, hidden in script["INTERNAL"].items():
        value = {"speculative_config": SpeculativeConfig, "RequestMetrics": RequestMetrics}.get(name)
        value = getattr(outrider, name) if value is None else value
        section = text.split(f"## `{name}`\n")[1].split("\n## ")[0]
        for member in hidden:
            assert hasattr(value, member) or member in ("engine", "bad_words_token_ids"), f"{name}.{member} is gone"
            assert not re.search(rf"^- `{member}[`(]", section, re.M)
    assert "cut_back" not in text and "`generate(" in text


def test_every_public_class_is_in_it() -> None:
    text = (DOCS / "api.md").read_text()
    assert all(f"## `{name}" in text for name in outrider.__all__ if name[0].isupper())
