"""Configs of well-known checkpoints are served, or refused by the key that stands in the way, as docs/checkpoints.md
says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.published import CHECKPOINTS, RECONSTRUCTED, outcome_of, page, row_of

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
ROWS = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("- `")}
# Architectures without a family take seconds, since transformers' code is looked at or run.
CASES = [pytest.param(name, marks=[] if checkpoint.has_family else pytest.mark.long)
         for name, checkpoint in CHECKPOINTS.items()]


@pytest.mark.parametrize("name", CASES)
def test_the_page_says_what_happens_to_a_config(name: str) -> None:
    assert row_of(CHECKPOINTS[name]) == ROWS[name], "python -m tests.models.published > docs/checkpoints.md"


def test_the_page_has_many_checkpoints_and_names_their_sources() -> None:
    assert PAGE.read_text() == page(lambda checkpoint: ROWS[checkpoint.name]) and len(ROWS) >= 60
    of_packages = [checkpoint for checkpoint in CHECKPOINTS.values() if checkpoint.source != "reconstructed"]
    assert len(of_packages) >= 60
    assert sum("refused" not in row for row in ROWS.values()) >= 60


@pytest.mark.parametrize("name", RECONSTRUCTED)
def test_a_reconstructed_config_has_the_size_that_its_makers_count(name: str) -> None:
    """Within what their rounding leaves open: memory may be wrong."""
    checkpoint, outcome = CHECKPOINTS[name], outcome_of(name)
    if outcome.is_served:
        assert outcome.num_parameters == pytest.approx((checkpoint.billions or 0) * 1e9, rel=0.03)
    else:
        assert name == "Qwen/Qwen2.5-7B-Instruct-1M" and "`dual_chunk_attention_config=" in outcome.says
