"""Page writes of one step: the last write of a cell wins, whatever order and overlap the writes have."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import Limits, PageWrite
from outrider.runner.row_state import RowState
from tests.unit.hash_mixer import make_layout

LIMITS = Limits(4, 8, 64, 0, 9)
GROUPS = make_layout((4, 0), (4, 9)).groups
WRITES = st.builds(PageWrite, st.integers(0, 1), st.integers(1, 4), st.integers(0, 9),
                   st.lists(st.integers(1, 50), min_size=1, max_size=6))


@given(st.lists(WRITES, max_size=8))
def test_the_last_write_of_a_cell_wins(writes: list[PageWrite]) -> None:
    state = RowState(LIMITS, GROUPS, torch.device("cpu"))
    expected = [table.clone() for table in state.page_tables]
    for write in writes:
        for i, page in enumerate(write.pages):
            expected[write.group][write.row, write.start + i] = page
    state.write_pages(writes)
    assert all(torch.equal(*pair) for pair in zip(state.page_tables, expected, strict=True))
