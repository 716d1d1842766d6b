"""Checks the masks of layers. Imported for the first layer with a mask."""

from __future__ import annotations

import dataclasses
import dis
from collections.abc import Iterator
from inspect import getattr_static
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from outrider.mixers.paged.masks import Mask

PLAIN = (int, float, bool, str, type(None))
UNCHANGING = (ModuleType, FunctionType, BuiltinFunctionType, type, property, staticmethod, classmethod)


def check_mask(mask: Mask, layer: int) -> None:
    """Raise an error for a mask that could change after it was compiled."""
    name = getattr(mask, "__name__", type(mask).__name__)
    must = "a mask is a frozen dataclass whose fields are numbers, strings or tuples of them"
    if not dataclasses.is_dataclass(mask) or isinstance(mask, type):
        raise ValueError(f"layer {layer}: the mask {name} is not a frozen dataclass, so it may read state that "
                         f"changes; {must}")
    if not type(mask).__dataclass_params__.frozen:
        raise ValueError(f"layer {layer}: the mask {name} is a dataclass that is not frozen; {must}")
    for field in dataclasses.fields(mask):
        value = getattr(mask, field.name)
        if not all(isinstance(item, PLAIN) for item in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"layer {layer}: the mask {name} holds {field.name}, a {type(value).__name__}; {must}")
    closed_over = getattr(type(mask).__call__, "__closure__", None)
    if closed_over:
        raise ValueError(f"layer {layer}: the mask {name} reads variables of the function that defines it; {must}")
    for variable in _outer_variables(type(mask)):
        raise ValueError(f"layer {layer}: the mask {name} reads the variable {variable}, which is not one of its "
                         f"fields and can change; {must}")


def _outer_variables(kind: type) -> Iterator[str]:
    """Return the variables outside itself that a mask's code reads, from its module and its class. Modules, functions
    and types are left out."""
    call = kind.__call__
    if not isinstance(call, FunctionType):
        return
    fields = {field.name for field in dataclasses.fields(kind)}
    for read in dis.get_instructions(call):
        found: Any = None
        if read.opname == "LOAD_GLOBAL":
            found = call.__globals__.get(read.argval)
        elif read.opname == "LOAD_ATTR" and read.argval not in fields:
            found = getattr_static(kind, read.argval, None)
        if found is not None and not isinstance(found, UNCHANGING):
            yield read.argval
