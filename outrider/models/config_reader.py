"""Typed reads of a config dict. A value that is unsupported or of the wrong type is refused by key.

A reader notes which keys are read. `refuse_unread` refuses every other key with a value, unless `harmless_keys.py`
lists it, so that no setting is ignored silently."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from outrider.core.fields import FLOAT32, INT32, Range, check_value, shown
from outrider.models.harmless_keys import HARMLESS, NOT_SERVED

T = TypeVar("T", int, float, str, bool, list[Any], dict[str, Any])

# The largest value of keys that count modules, far above every published model: building so many takes a second or two,
# and a damaged file could ask for millions.
LARGEST = {"num_hidden_layers": 1024, "num_experts": 4096, "num_local_experts": 4096, "n_routed_experts": 4096,
           "num_nextn_predict_layers": 64}
# What to do about a value that contradicts the rest of a config, or that belongs to a model that no family serves.
CORRECT = "Correct it if the file was edited; otherwise this checkpoint cannot be served."
INCOMPLETE = "Add it, or fetch the file again if it is damaged."
NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})  # values with which a key says nothing


class ConfigError(ValueError):
    """Raised for a config that is not supported. The message names the file and the key."""


@dataclass
class _Reads:
    """Records which keys of one config dict were read. `sections` has a record for each nested dict."""

    values: Mapping[str, Any]
    source: str
    keys: set[str] = field(default_factory=set)
    sections: dict[str, _Reads] = field(default_factory=dict)

    def section(self, key: str) -> _Reads:
        if key not in self.sections:
            values = self.values.get(key)
            self.sections[key] = _Reads(values if isinstance(values, Mapping) else {}, f"{self.source}: {key}")
        return self.sections[key]

    def unread(self) -> Iterator[tuple[_Reads, str]]:
        for key, value in self.values.items():
            if key in self.sections:
                yield from self.sections[key].unread()
            elif key not in self.keys and key not in HARMLESS and not _is_neutral(value):
                yield self, key


class ConfigReader:
    """A config dict and the file it came from. A null key counts as absent."""

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", reads: _Reads | None = None,
                 file_names: Mapping[str, str] | None = None) -> None:
        """file_names: maps the key names that a family reads to the names in the file, where the two differ
        (`with_names`)."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source} must hold a dict, got {shown(values)}")
        self.values = values  # unnoted: families read by the methods below
        self.source = source
        self._reads = _Reads(values, source) if reads is None else reads
        self._file_names = file_names or {}

    def required(self, key: str, kind: type[T], least: float = 1) -> T:
        """Return the value of a required key. `least`: the smallest allowed integer, by default 1, because required
        integers are sizes or counts."""
        if not self.has(key):
            raise ConfigError(f"{self.source}: {self._name(key)} is missing. {INCOMPLETE}")
        return self._typed(key, kind, least if kind is int else None, None)

    def get(self, key: str, kind: type[T], default: T, least: float | None = None, most: float | None = None) -> T:
        """Return the value of a key, or the default. `least`, `most`: bounds of a number. Without bounds an integer
        must be at least 0, and a float may have any value."""
        return self._typed(key, kind, least, most) if self.has(key) else default

    def optional(self, key: str, kind: type[T], least: float | None = None, most: float | None = None) -> T | None:
        return self._typed(key, kind, least, most) if self.has(key) else None

    def must_equal(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """Check that the key's value is one of `allowed`. An absent key has the value `default`."""
        value = self.raw(key) if self.has(key) else default
        if value not in allowed:
            raise self.refusal(key, f"supported: {', '.join(repr(a) for a in allowed)}")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self.raw(key) is not None

    def raw(self, key: str) -> Any:
        """Return the key's unchecked value from the file, or None if the key is absent."""
        self._reads.keys.add(key)
        return self.values.get(key)

    def passes_over(self, *keys: str) -> None:
        """Mark these keys as read, because other keys of this config make them meaningless."""
        self._reads.keys.update(keys)

    def refusal(self, key: str, why: str, advice: str = CORRECT) -> ConfigError:
        """Return the error for a value that no model here supports. `advice`: a sentence that says what to do."""
        said = f"{self.source}: {self._name(key)}={shown(self.values.get(key))} is not supported; {why}"
        return ConfigError(f"{said}. {advice}" if advice else said)

    def section(self, key: str) -> ConfigReader:
        """Return a reader of the dict under `key`. Its messages name the path, and `refuse_unread` checks its keys
        too."""
        return ConfigReader(self.required(key, dict), f"{self.source}: {key}", self._reads.section(key))

    def section_or_empty(self, key: str) -> ConfigReader:
        return self.section(key) if self.has(key) else ConfigReader({}, f"{self.source}: {key}")

    def text_section(self) -> ConfigReader:
        """Return the section that describes the language model, or the config itself if it has no sections."""
        return self.section("text_config") if self.has("text_config") else self

    def with_values(self, values: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of the config with some values replaced or added, for families with other names or defaults.
        A key that is read from the new reader counts as read in this one."""
        return ConfigReader({**self.values, **values}, self.source, self._reads, self._file_names)

    def with_names(self, names: Mapping[str, str]) -> ConfigReader:
        """Return a reader that also finds keys under the names that other families use. names: maps such a name to the
        file's name, which messages show. A file may have either name, but not both with different values."""
        values, file_names = {}, dict(self._file_names)
        for name, file_name in names.items():
            if not self.has(file_name):
                file_names |= {} if self.has(name) else {name: f"{file_name} (or {name})"}
                continue
            if self.has(name) and self.raw(file_name) != self.raw(name):
                raise self.refusal(file_name, f"it contradicts {name}={shown(self.raw(name))}")
            values[name], file_names[name] = self.raw(file_name), file_name
        return ConfigReader({**self.values, **values}, self.source, self._reads, file_names)

    def with_defaults(self, values: Mapping[str, Any]) -> ConfigReader:
        """Return the config with values for keys that the file leaves out. A null key in the file stays null."""
        return self.with_values({key: value for key, value in values.items() if key not in self.values})

    def _name(self, key: str) -> str:
        """Return the file's name for a key."""
        return self._file_names.get(key, key)

    def refuse_unread(self) -> None:
        """Raise ConfigError for keys of the file that no code has read and that are not known to be harmless."""
        unread = list(self._reads.unread())
        if not unread:
            return
        known = next(((reads, key) for reads, key in unread if key in NOT_SERVED), None)
        if known is not None:
            reads, key = known
            raise ConfigError(f"{reads.source}: {key}={shown(reads.values[key])} is not supported: {NOT_SERVED[key]}")
        said = ", ".join(f"{key}={shown(reads.values[key])}" for reads, key in unread)
        names = ", ".join(repr(key) for _, key in unread)
        raise ConfigError(
            f"{unread[0][0].source}: {said}: Outrider does not read this, so the model might compute other results "
            f"than intended. If you know that this has no effect, set ignore_config_keys=[{names}]")

    def _typed(self, key: str, kind: type[T], least: float | None, most: float | None) -> T:
        value = self.values[key]
        declared: Any = kind
        if kind is int:
            declared = Annotated[int, Range(0 if least is None else least, most or LARGEST.get(key, INT32))]
        elif kind is float and (least is not None or most is not None):
            low, high = (-FLOAT32 if least is None else least), (FLOAT32 if most is None else most)
            declared = Annotated[float, Range(low, high)]
        try:
            check_value(self._name(key), declared, value)
        except ValueError as error:
            raise ConfigError(f"{self.source}: {error}") from None
        return kind(value) if kind is float else value


def without_keys(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a config without some keys, at any depth."""
    return {key: without_keys(value, keys) if isinstance(value, Mapping) else value
            for key, value in values.items() if key not in keys}


def _is_neutral(value: Any) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL)
