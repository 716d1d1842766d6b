"""Tiny model folders, saved once a session and only when a test asks for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.models.oracle import make_folder


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda family: make_folder(family, root / family))
