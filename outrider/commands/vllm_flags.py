"""Reads flags of vLLM's command lines: dotted names, lists of values, and names that are not flags here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.compat.argument_parser import plain_flags
from outrider.compat.settings import Meaning

LIST_FLAGS = ("--api-key", "--served-model-name", "--allowed-origins")


def own_flags(words: Sequence[str]) -> list[str]:
    """Rewrite a command line into the form that the commands of this package read."""
    return plain_flags(_one_flag_each(words))


def _one_flag_each(words: Sequence[str]) -> list[str]:
    """Repeat a flag before each of its values: `--api-key A B`. This is done only if the model comes first, as in
    `serve MODEL --api-key A B`: otherwise B may be the model."""
    if len(words) < 2 or words[0] != "serve" or words[1].startswith("-"):
        return list(words)
    result: list[str] = []
    flag, num_values = "", 0
    for word in words:
        if word.startswith("-"):
            flag, num_values = word.replace("_", "-"), 0
        else:
            num_values += 1
            result += [flag] if flag in LIST_FLAGS and num_values > 1 else []
        result.append(word)
    return result


def add_unlisted_flags(group: Any, table: Mapping[str, Meaning]) -> None:
    """Add flags that the help does not list: they are accepted, or refused by name."""
    for name, meaning in table.items():
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if meaning.is_switch else {"type": _any_value}
        group.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)


def _any_value(text: str) -> Any:
    """Read a value written as in Python or JSON; other text is returned unchanged."""
    try:
        return json.loads({"None": "null", "True": "true", "False": "false"}.get(text, text))
    except ValueError:
        return text
