"""Values of collections that a declaration allows."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.fields import check_value


class Text(str):
    """A caller's own kind of text."""


@pytest.mark.parametrize(("declared", "value", "is_held"), [
    (list[str], ["a", "é"], True), (list[str], [], True), (list[str], ["a", "\ud800"], False),
    (list[str], ["\ud83d", "\ude00"], False), (list[str], ["a", 1], False), (list[str], [Text("a")], True),
    (list[int], [1, 2], True), (list[int], [1, True], False), (list[int], [1, 2.0], False),
    (dict[str, int], {"a": 1}, True), (dict[str, int], {"\ud800": 1}, False), (dict[str, int], {"a": "b"}, False),
])
def test_items_are_checked_together_as_they_are_one_by_one(declared: Any, value: Any, is_held: bool) -> None:
    if is_held:
        check_value("x", declared, value)
    else:
        with pytest.raises(ValueError, match="^x must be"):
            check_value("x", declared, value)
