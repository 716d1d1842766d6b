"""Unservable: the error that says why the engine cannot serve a model of transformers."""

from __future__ import annotations


class Unservable(ValueError):
    """Raised for a model with code that the engine cannot serve. The message is the reason; the model adds the config
    and the key."""


def words_of(error: Exception) -> str:
    """Write an exception of another package in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
