"""Typed reads of a config dict. A value of the wrong type, or one that is not supported, is refused by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from outrider.core.fields import INT32, Range, check_value, shown

T = TypeVar("T", int, float, str, bool, list, dict)


class ConfigError(ValueError):
    """Raised for a config that is not supported. The message names the key."""


class ConfigReader:
    """One config dict and where it came from. A key that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source} must hold a dict, got {shown(values)}")
        self.values = values
        self.source = source

    def required(self, key: str, kind: type[T], least: int = 1) -> T:
        """The value of a key that must be there. `least`: the smallest integer allowed; required ones are sizes or
        counts, so it is 1."""
        if self.values.get(key) is None:
            raise ConfigError(f"{self.source}: {key} is missing")
        return self._typed(key, kind, least)

    def get(self, key: str, kind: type[T], default: T, least: int = 0) -> T:
        return default if self.values.get(key) is None else self._typed(key, kind, least)

    def optional(self, key: str, kind: type[T], least: int = 0) -> T | None:
        return None if self.values.get(key) is None else self._typed(key, kind, least)

    def must_equal(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The key's value, which must be one of `allowed`; absent means `default`."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in allowed:
            raise self.refusal(key, f"supported: {', '.join(repr(a) for a in allowed)}")
        return value

    def refusal(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.source}: {key}={self.values.get(key)!r} is not supported; {why}")

    def section(self, key: str) -> ConfigReader:
        """The dict under `key`, with messages that name the path."""
        return ConfigReader(self.required(key, dict), f"{self.source}: {key}")

    def text_section(self) -> ConfigReader:
        """The part that describes the language model, where a config has others beside it."""
        return self if self.values.get("text_config") is None else self.section("text_config")

    def _typed(self, key: str, kind: type[T], least: int) -> T:
        value = self.values[key]
        try:
            check_value(key, Annotated[int, Range(least, INT32)] if kind is int else kind, value)
        except ValueError as error:
            raise ConfigError(f"{self.source}: {error}") from None
        return kind(value) if kind is float else value
