"""FlexibleArgumentParser, and the flags of EngineArgs, for scripts that parse their own command line. No torch.

Every flag has a default, because scripts pass all of them on: `LLM(**vars(parser.parse_args()))`. The package's own
commands use another parser (`commands/parser.py`), in which a flag that is not given is absent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from outrider.compat.settings import VLLM_SETTINGS, Meaning, Refused, SameAs
from outrider.config import EngineConfig

DEFAULT_MODEL = "smollm2"
# Settings that vLLM has by another name. They are absent unless given, so that a script may give either of the two.
RENAMED = {meaning.name for meaning in VLLM_SETTINGS.values() if isinstance(meaning, SameAs)}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that accepts --max_model_len for --max-model-len, and the keys of a JSON object as separate flags:
    `--speculative-config.method ngram --speculative-config.num_speculative_tokens 3`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(plain_flags(sys.argv[1:] if args is None else args), namespace)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    kinds = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        default = argparse.SUPPRESS if field.name in RENAMED else field.default
        _add_flag(group, field.name, kinds[field.name], DEFAULT_MODEL if field.name == "model" else default)
    for name, meaning in VLLM_SETTINGS.items():
        _add_flag(group, name, bool if meaning.is_switch else Any, _neutral(meaning), help=argparse.SUPPRESS)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings among the arguments of a script."""
    names = [*(field.name for field in fields(EngineConfig)), *VLLM_SETTINGS]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _add_flag(group: Any, name: str, kind: Any, default: Any, **more: Any) -> None:
    flag = "--" + name.replace("_", "-")
    if kind in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, **more)
    else:
        group.add_argument(flag, type=_reader(kind), default=default, **more)


def _neutral(meaning: Meaning) -> Any:
    """Return the default of a setting's flag. Where possible it is a number or a switch that changes nothing, because
    scripts compute with it."""
    if not isinstance(meaning, Refused):
        return None
    return next((value for value in meaning.neutral if isinstance(value, int)), None)


def _reader(kind: Any) -> Any:
    """A function that converts a flag's text to the setting's type."""
    kinds = [one for one in get_args(kind) if one is not type(None)] or [kind]

    def read(text: str) -> Any:
        if text == "None" or kinds == [str]:
            return None if text == "None" else text
        if kinds in ([int], [float]):
            return kinds[0](text)
        try:
            value = json.loads({"True": "true", "False": "false"}.get(text, text))
        except ValueError:
            return text
        return value

    return read


def plain_flags(words: Sequence[str]) -> list[str]:
    """Rewrite flags in argparse's form: hyphens for underscores, and one JSON object for all keys of a dotted flag."""
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            plain.append(name + equals + value)
            continue
        flag, *keys = name.split(".")
        flag = flag.replace("_", "-")
        if not keys:
            plain.append(flag + equals + value)
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        inner = objects.setdefault(flag, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = _reader(Any)(value)
    return plain + [word for flag, given in objects.items() for word in (flag, json.dumps(given))]
