"""Checks of values that come from callers. Each check is declared as part of a field's type.

A dataclass declares a field as `top_k: Annotated[int, Range(0, 100)] = 0`. `check_fields` checks all fields of an
instance and raises a ValueError that names the field, the allowed values and the given value. A bool does not count as
an integer; NaN, infinities and numbers too large for a float32 do not count as numbers. No torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from types import NoneType, UnionType
from typing import Annotated, Any, Protocol, TypeAlias, Union, get_args, get_origin, get_type_hints

INT32, INT64 = 2**31 - 1, 2**63 - 1  # the largest integers that device tensors hold
FLOAT32 = 3.4e38
CLOSE = 0.6  # how alike a word and the name must be that it is taken for: other words share half of their letters
SURE = 0.7  # the same of a value, where most names are short
LEAST_BEGINNING = 4  # letters of a word that may stand for a longer name
MARKS = "-/"  # before a flag, a command and a route
MOST_LISTED = 10  # names in a message


class Rule(Protocol):
    """A restriction on the values that a type allows."""

    def holds(self, value: Any) -> bool: ...

    def words(self, kind: str) -> str:
        """Return the restriction in words, for an error message. `kind` names the type, such as "an integer"."""


@dataclasses.dataclass(frozen=True)
class Range:
    low: float
    high: float
    also: tuple[float, ...] = ()  # single values outside the range that have a meaning of their own

    def holds(self, value: Any) -> bool:
        return self.low <= value <= self.high or value in self.also

    def words(self, kind: str) -> str:
        return f"{kind} from {self.low} to {self.high}" + "".join(f" or {value}" for value in self.also)


@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
    names: Sequence[Any]  # may grow: a name that is registered later is allowed too
    pattern: str | None = None  # a regular expression of further allowed texts
    also: str = ""  # describes the texts of `pattern` in error messages
    meant: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names by what others call the same thing

    def holds(self, value: Any) -> bool:
        return value in self.names or (self.pattern is not None and re.fullmatch(self.pattern, value) is not None)

    def words(self, kind: str) -> str:
        return f"one of {', '.join(map(str, self.names))}" + (f" or {self.also}" if self.also else "")


@dataclasses.dataclass(frozen=True)
class Finite:
    """Advice for the error message about an infinite number, which no field accepts. `instead`: the value to give
    instead."""

    instead: str

    def holds(self, value: Any) -> bool:
        return True

    def words(self, kind: str) -> str:
        return f"{kind} that is finite ({self.instead})"


class NotEmpty:
    @staticmethod
    def holds(value: Any) -> bool:
        return len(value) > 0

    @staticmethod
    def words(kind: str) -> str:
        items = kind.removeprefix("a list, each ")
        return f"{kind} (not empty)" if items == kind else f"a list (not empty), each {items}"


Count: TypeAlias = Annotated[int, Range(1, INT32)]
TokenId: TypeAlias = Annotated[int, Range(0, INT32)]
Text: TypeAlias = Annotated[str, NotEmpty]
Check = tuple[Callable[[Any], bool], str]  # whether a value is allowed; which values are, in words


def check_fields(owner: str, instance: Any) -> None:
    """Raise ValueError for the first field of a dataclass instance that breaks its declaration."""
    for name, holds, declared in _checks_of(instance.__class__):
        if not holds(getattr(instance, name)):
            check_value(owner + name, declared, getattr(instance, name))


def check_value(name: str, declared: Any, value: Any) -> None:
    """Raise ValueError if the value does not match a type, which may be plain or `Annotated`."""
    if not _holds(declared)(value):
        meant, allowed = _name_meant(declared, value), _check_of(declared)[1]
        if meant is not None:
            raise ValueError(f"{name} {shown(value)}: did you mean {meant!r}? It must be {allowed}")
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}{_broken(value)}")


def _broken(value: Any) -> str:
    """Return the end of an error message about a text, or a list of texts, that UTF-8 cannot encode. Empty if it
    can."""
    texts = "".join(text for text in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(text, str))
    if re.search("[\udc80-\udcff]", texts):  # so Python writes bytes of a terminal or pipe that it cannot read
        return ", which was not written in UTF-8, or holds half of a character"
    return "" if _is_text(texts) else ", which holds half of a character (a lone surrogate)"


def _name_meant(declared: Any, value: Any) -> str | None:
    """Return the allowed name nearest to a misspelt one. None if the type does not list its allowed names."""
    given = value if isinstance(value, (list, tuple)) else [value]
    for rule in _rules_of(declared):
        names = [name for name in rule.names if isinstance(name, str)]
        for word in given:
            if isinstance(word, str) and word not in names:
                likely = [name for name in names if not _has_other_number(word, name)]
                return rule.meant.get(word.lower()) or nearest(word, likely, SURE)
    return None


def _has_other_number(word: str, name: str) -> bool:
    """Whether two names differ only in the number at their end: int8 is not a misspelling of int4. The same digits in
    another order are one (float23)."""
    one, other = (re.fullmatch(r"(\D+)(\d+)", each) for each in (word, name))
    return one is not None and other is not None and one[1] == other[1] and sorted(one[2]) != sorted(other[2])


def _rules_of(declared: Any) -> list[OneOf]:
    """Return all `OneOf` rules in a declaration."""
    if isinstance(declared, OneOf):
        return [declared]
    return [rule for part in get_args(declared) for rule in _rules_of(part)]


def shown(value: Any) -> str:
    """Return a value as text for an error message: always short, even for values that cannot be shown."""
    try:
        text = repr(value)
    except Exception:  # a caller's own __repr__, or an integer of too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def nearest(word: str, known: Iterable[str], cutoff: float = CLOSE) -> str | None:
    """Return the known name that is nearest to a misspelt one."""
    names = list(known)
    longest = max(map(len, names), default=0)
    if 2 * longest < cutoff * (len(word) + longest):
        return None  # so long that no name is alike; difflib would take seconds to find that of a megabyte
    found = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the name that was probably meant, if there is one, or the first name that
    begins with the word. Marks before flags and routes (`--`, `/`) and the case of letters are not compared."""
    names = {name.lstrip(MARKS).lower(): name for name in reversed(list(known))}
    bare = word.lstrip(MARKS).lower()
    begun = (name for name in reversed(names) if len(bare) >= LEAST_BEGINNING and name.startswith(bare))
    near = nearest(bare, names) or next(begun, None)
    return f": did you mean {names[near]}?" if near else ""


def unknown_name(what: str, word: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return an error message about an unknown name. It suggests the name that was probably meant, then a few others.
    `also`: names that may be meant and are not listed."""
    names, word = list(known), word[:100]
    listed = names if len(names) <= MOST_LISTED else difflib.get_close_matches(word, names, MOST_LISTED, cutoff=0)
    more = f" and {len(names) - len(listed)} more" if len(listed) < len(names) else ""
    hint = did_you_mean(word, [*names, *also])
    return f"unknown {what} {shown(word)}{hint or ';'} {'Known' if hint else 'known'} are {', '.join(listed)}{more}"


def check_names(owner: str, kind: Any, given: Iterable[str], refused: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for the first given name that is no field of the dataclass `kind`. Called before the generated
    __init__, which could only say "unexpected keyword". refused: why known names have no field."""
    for name in given:
        if refused and name in refused:
            raise ValueError(f"{owner}: {name} is not supported: {refused[name]}")
        if name not in kind.__dataclass_fields__:
            raise ValueError(f"{owner}: {unknown_name('field', name, kind.__dataclass_fields__)}")


def declared_fields(kind: Any) -> dict[str, Any]:
    """Return the declared type of every field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@cache
def _checks_of(kind: Any) -> list[tuple[str, Callable[[Any], bool], Any]]:
    return [(name, _holds(declared), declared) for name, declared in declared_fields(kind).items()]


@cache
def _holds(declared: Any) -> Callable[[Any], bool]:
    return _check_of(declared)[0]


def _check_of(declared: Any) -> Check:
    parts, args = get_origin(declared), get_args(declared)
    if parts is Annotated:
        return reduce(_with_rule, args[1:], _check_of(args[0]))
    if parts in (Union, UnionType):
        return reduce(_either, map(_check_of, args))
    if parts is tuple and args[-1] is not Ellipsis:
        checks = [_check_of(part) for part in args]
        return ((lambda value: isinstance(value, (list, tuple)) and len(value) == len(checks)
                 and all(holds(own) for (holds, _), own in zip(checks, value, strict=True))),
                f"a list of {len(checks)}: {', '.join(words for _, words in checks)}")
    if parts in (list, tuple):
        each, words = _all_of(args[0])
        return (lambda value: isinstance(value, (list, tuple)) and each(value)), f"a list, each {words}"
    if parts is dict:
        (keys, key_words), (items, item_words) = map(_all_of, args)
        return ((lambda value: isinstance(value, dict) and keys(value) and items(value.values())),
                f"a dict, each key {key_words}, each value {item_words}")
    if dataclasses.is_dataclass(declared):  # whose instances have checked themselves
        kind = declared if isinstance(declared, type) else type(declared)
        return (lambda value: isinstance(value, kind)), f"a {kind.__name__}"
    if isinstance(declared, enum.EnumMeta):
        return (lambda value: isinstance(value, declared)), f"a {declared.__name__}"
    if declared not in PLAIN and isinstance(declared, type):
        return (lambda value: isinstance(value, declared)), f"a {declared.__name__}"
    return PLAIN[declared]


def _all_of(declared: Any) -> Check:
    """Make a check of all items of a collection. It is fast for long ones: of plain integers, such as token ids, only
    the least and the greatest are checked, and texts, such as a vocabulary, are checked as one joined text."""
    each, words = _check_of(declared)
    if declared is str:
        return (lambda items: (set(map(type, items)) <= {str} and _is_text("".join(items)))
                or all(map(each, items))), words
    if declared is int:
        return (lambda items: set(map(type, items)) <= {int} or all(map(each, items))), words
    if declared is not TokenId:
        return (lambda items: all(map(each, items))), words
    return (lambda items: (set(map(type, items)) == {int} and each(min(items)) and each(max(items)))
            or all(map(each, items))), words


def _with_rule(check: Check, rule: Rule) -> Check:
    holds, in_rule = check[0], rule.holds
    return (lambda value: holds(value) and in_rule(value)), rule.words(check[1])


def _either(first: Check, second: Check) -> Check:
    in_first, in_second = first[0], second[0]
    words = second[1].replace(f"each {first[1]}", "each of these")  # a value, or a list of such values
    return (lambda value: in_first(value) or in_second(value)), f"{first[1]} or {words}"


def _is_text(value: Any) -> bool:
    """Whether a value is a text that can be encoded as UTF-8. A text with a lone surrogate cannot."""
    return isinstance(value, str) and (value.isascii() or not re.search("[\ud800-\udfff]", value))


PLAIN: dict[Any, Check] = {
    bool: (lambda value: isinstance(value, bool), "True or False"),
    int: (lambda value: isinstance(value, int) and not isinstance(value, bool), "an integer"),
    float: (lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= FLOAT32,
            "a number"),
    str: (_is_text, "a text"),
    list: (lambda value: isinstance(value, list), "a list"),
    tuple: (lambda value: isinstance(value, tuple), "a tuple"),
    dict: (lambda value: isinstance(value, dict), "a dict"),
    NoneType: (lambda value: value is None, "None"),
    Any: (lambda value: True, "anything"),
}
