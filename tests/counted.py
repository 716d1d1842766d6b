"""How often methods are called while a test runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def count_calls(monkeypatch: pytest.MonkeyPatch, *methods: tuple[type, str]) -> Counter[str]:
    """Calls by "Class.method", from now on."""
    counts: Counter[str] = Counter()

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[f"{owner.__name__}.{name}"] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in methods:
        watch(owner, name)
    return counts
