"""A stand-in for Triton's driver while forks and threads compile. They cannot ask the device themselves, so its answers
are recorded beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.runtime import driver


@dataclass(frozen=True)
class _AskedDriver:
    """Replaces Triton's driver during compilation, with recorded answers to the compiler's questions about the
    device."""

    driver: Any
    device: int
    target: Any

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)


@contextmanager
def asking_no_device() -> Iterator[None]:
    """A context in which Triton's compiler gets its answers from `_AskedDriver`: a fork cannot ask the device, and a
    new thread would ask device 0."""
    active = driver.active
    driver.set_active(_AskedDriver(active, active.get_current_device(), active.get_current_target()))
    try:
        yield
    finally:
        driver.set_active(active)
