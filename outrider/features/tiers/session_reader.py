"""SessionReader: reads the cache session that a prompt names. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.cache.sessions import CacheSession
from outrider.core.hidden_params import RequestParams
from outrider.engine.input_reader import InputReader
from outrider.engine.served_model import ServedModel

MOST_CHARACTERS = 200


class SessionReader(InputReader):
    def __init__(self, prompt: Mapping[str, Any], params: RequestParams, model: ServedModel) -> None:
        self._given = prompt["cache_session"]

    def make_parts(self, token_ids: Sequence[int]) -> list[CacheSession]:
        return [session_of(self._given)]


def session_of(given: str | tuple[str, str]) -> CacheSession:
    """A session by its name, or by its owner and name. Raises ValueError for a name that cannot be served."""
    owner, name = ("", given) if isinstance(given, str) else given
    if not 0 < len(name) <= MOST_CHARACTERS:
        raise ValueError(f"cache_session must have from 1 to {MOST_CHARACTERS} characters, got {len(name)}")
    return CacheSession(owner, name)
