"""Unservable: the error that names the reason why the engine cannot serve a model of transformers."""

from __future__ import annotations


class Unservable(ValueError):
    """Raised for a model whose code the engine cannot serve. The message is the reason; the caller adds the config's
    file and key."""


def words_of(error: Exception) -> str:
    """Write an exception of another package in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
