"""After an interrupt, adapters that were read again meanwhile are dropped before their requests have resumed."""

from __future__ import annotations

from outrider.features.adapters.loads import AdapterRegistry

NAME = "reset drops adapters"
TESTS = ["tests/adapters/test_interrupts.py", "-k", "its_adapter_that"]


def apply() -> None:
    forget = AdapterRegistry.forget_requests

    def forget_and_drop(self: AdapterRegistry) -> None:
        forget(self)
        self.drop_unused()

    AdapterRegistry.forget_requests = forget_and_drop  # type: ignore[method-assign]
