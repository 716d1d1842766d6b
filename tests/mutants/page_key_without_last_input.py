"""A page's key leaves out an input that begins at the page's last token."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.input_part import InputParts

NAME = "page key without last input"
TESTS = ["tests/unit/test_cache_prefix.py", "-k", "page_that_it_begins_in"]


def apply() -> None:
    page_content = InputParts.page_content

    def one_short(self: InputParts, start: int, end: int, token_ids: Sequence[int]) -> list[int]:
        return page_content(self, start, end - 1, token_ids)

    InputParts.page_content = one_short  # type: ignore[method-assign]
