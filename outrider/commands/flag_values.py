"""Converts the text after a flag to the type of the flag's setting. A text of the wrong type is refused with an
example."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Annotated, Any

from outrider.config import AUTO_DRAFTER, METHODS
from outrider.core.fields import Count, NotEmpty, Range, check_value
from outrider.core.structured import StructuredOutputsParams
from outrider.core.token_ids import bias_from_json


def count_flag(text: str) -> int:
    """Read a number of tokens, rounds or requests."""
    return _checked(Count, whole_number(text))


def whole_flag(low: int, high: int) -> Callable[[str], int]:
    return lambda text: _checked(Annotated[int, Range(low, high)], whole_number(text))


def counts_flag(text: str) -> tuple[int, ...]:
    return _checked(Annotated[tuple[Count, ...], NotEmpty], number_list(text))


def number_flag(low: float, high: float) -> Callable[[str], float]:
    return lambda text: _checked(Annotated[float, Range(low, high)], _real(text))


def _checked(declared: Any, value: Any) -> Any:
    try:
        check_value("it", declared, value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def number_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers, such as 1,2,3") from None


def _drafter(text: str) -> dict[str, Any] | str | None:
    if text.lower() in ("none", "null"):
        return None
    return AUTO_DRAFTER if text.lower() == AUTO_DRAFTER else json_object(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        hint = f"; write '{{\"method\": \"{text}\", \"num_speculative_tokens\": 4}}'" if text in METHODS else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}{hint}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _bias(text: str) -> dict[int, float]:
    bias = json_object(text)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in bias.values()):
        raise argparse.ArgumentTypeError(f'{text!r} must map token ids to numbers, such as {{"42": -5}}')
    try:
        return bias_from_json(bias)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _form(text: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams.from_fields(json_object(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _drafts(text: str) -> bool | int:
    words = {"true": True, "false": False, "yes": True, "no": False}
    if text.lower() in words:
        return words[text.lower()]
    return whole_number(text)


def whole_number(text: str) -> int:
    """Read an integer, or a large one in vLLM's notation: 4k is 4000, 4K is 4096, and so on; 4GiB is 4G."""
    sized = re.fullmatch(r"(\d{1,6})([kmgtKMGT])(?:(?<=[KMGT])iB)?", text)
    if sized is not None:
        power = "kmgt".index(sized[2].lower()) + 1
        return int(sized[1]) * (1000 if sized[2].islower() else 1024) ** power
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


CONVERTERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    **dict.fromkeys((int, int | None), ("N", whole_number)),
    float: ("X", _real),
    float | None: ("X", _real),
    str: ("NAME", str),
    str | None: ("NAME", str),
    tuple[int, ...]: ("N,N", number_list),
    list[int] | None: ("N,N", lambda text: list(number_list(text))),
    dict[str, Any] | None: ("JSON", json_object),
    dict[str, Any] | str | None: ("JSON", _drafter),
    dict[int, float] | None: ("JSON", _bias),
    StructuredOutputsParams | None: ("JSON", _form),
    bool | int | None: ("K", _drafts),
}
