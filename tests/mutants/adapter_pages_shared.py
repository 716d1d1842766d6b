"""Pages are keyed without the adapter: a request goes on from keys and values that another adapter has made."""

from __future__ import annotations

from outrider.core.checked_request import CheckedRequest

NAME = "adapter pages shared"
TESTS = ["tests/adapters/test_engine.py", "-k", "own_adapter and llama and None"]


def apply() -> None:
    keys = CheckedRequest.cache_keys.fget  # type: ignore[attr-defined]

    def without_adapter(self: CheckedRequest) -> tuple[str, ...]:
        return tuple(key for key in keys(self) if not key.startswith("adapter="))

    CheckedRequest.cache_keys = property(without_adapter)  # type: ignore[assignment, method-assign]
