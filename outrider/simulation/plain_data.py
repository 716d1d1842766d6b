"""Converts dataclasses and named tuples to JSON and back. The class of an object is stored under "is".

Only classes that are listed here can be read, so a file cannot create other objects.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

from outrider.cache.groups import CacheLayout, Group, Place, PlacedPart
from outrider.cache.kinds import (
    CacheType,
    ChunkedSpec,
    ElementType,
    FullSpec,
    IndexedLatentSpec,
    IndexedSpec,
    LatentSpec,
    Part,
    PooledIndexSpec,
    RecurrentKind,
    RecurrentSpec,
    ScaledIndexSpec,
    SlidingSpec,
)
from outrider.core import Limits
from outrider.core.costs import DraftCost, MixedStepCosts, ReadCost, StepCosts
from outrider.core.fields import check_value, shown
from outrider.runner.interface import (
    BoundedSteps,
    FixedDrafting,
    MeasuredDrafting,
    NoDrafting,
    UnboundedSteps,
    WorkerInfo,
)

CLASSES: tuple[type[Any], ...] = (
    BoundedSteps, CacheLayout, CacheType, ChunkedSpec, DraftCost, ElementType, FixedDrafting, FullSpec, Group,
    IndexedLatentSpec, IndexedSpec, LatentSpec, Limits, MeasuredDrafting, MixedStepCosts, NoDrafting, Part, Place,
    PlacedPart, PooledIndexSpec, ReadCost, RecurrentKind, RecurrentSpec, ScaledIndexSpec, SlidingSpec, StepCosts,
    UnboundedSteps, WorkerInfo,
)


def to_plain(value: Any) -> Any:
    """Convert a value to numbers, strings, lists and dictionaries with string keys. Data of features are left out,
    because a simulation has no features."""
    if isinstance(value, Limits):
        value = replace(value, parts=())
    if is_dataclass(value):
        own = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {"is": type(value).__name__, **own}
    if hasattr(value, "_asdict"):
        return {"is": type(value).__name__, **{name: to_plain(own) for name, own in value._asdict().items()}}
    if isinstance(value, dict):
        return {"is": "dict", "items": [[to_plain(key), to_plain(own)] for key, own in value.items()]}
    if isinstance(value, (list, tuple)):
        return [to_plain(own) for own in value]
    return value


def from_plain(value: Any, more: tuple[type[Any], ...] = ()) -> Any:
    """Convert the result of `to_plain` back, with lists as tuples. `more`: further classes that may occur. Raises
    ValueError for an unknown class or field, and for a value of the wrong type, because people edit the files."""
    if isinstance(value, list):
        return tuple(from_plain(own, more) for own in value)
    if not isinstance(value, dict):
        return value
    name = value.get("is")
    if name == "dict":
        return _dict_from_plain(value.get("items"), more)
    found = next((known for known in (*CLASSES, *more) if known.__name__ == name), None)
    if found is None:
        raise ValueError(f"the file has the unknown type {shown(name)}: it was written by another version, so make it "
                         "again")
    given = {key: from_plain(own, more) for key, own in value.items() if key != "is"}
    declared = get_type_hints(found, include_extras=True)
    for key, own in given.items():
        if key in declared:
            check_value(f"the file's {name}: {key}", declared[key], own)
    try:
        return found(**given)
    except TypeError as error:
        raise ValueError(f"the file's {name} differs from this version's, so make the file again: {error}") from None


def _dict_from_plain(items: Any, more: tuple[type[Any], ...]) -> dict[Any, Any]:
    if not isinstance(items, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in items):
        raise ValueError(f"each dict of the file needs `items`, a list of [key, value] pairs, got {shown(items)}")
    return {from_plain(key, more): from_plain(own, more) for key, own in items}
