"""Error messages for a wrong body or query: one sentence that names the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.core.fields import did_you_mean, shown
from outrider.server.errors import ApiError

Problem = Mapping[str, Any]  # as pydantic tells it
UNKNOWN = "unknown_field"  # kind of problem: there is no such field
FIRST = ("refused", UNKNOWN)  # kinds of problems that say more than others, which often follow from them
MAX_NAME = 100  # characters of a name that an error repeats
TRUTHS = {"true": True, "1": True, "false": False, "0": False}
MAX_PROBLEMS = 1000  # problems that are looked at: a long list may have one for each of its items


def bad_body(problems: Sequence[Problem], body: Any) -> ApiError:
    """Make the error for a wrong body."""
    problems = problems[:MAX_PROBLEMS]
    first = next((problem for kind in FIRST for problem in problems if problem["type"] == kind), problems[0])
    place = _place(first, body)
    param = place[0][:MAX_NAME] if place else None
    match first["type"]:
        case "refused":
            where = f"{'.'.join(place)}: " if place else ""
            return ApiError(400, where + first["msg"], param=param or first["ctx"]["param"])
        case "json_invalid":
            return ApiError(400, "the body is not valid JSON")
        case "missing" if not place:
            return ApiError(400, "the request has no body")
        case "unknown_field":
            place = [*place, first["ctx"]["name"]]
            hint = first["ctx"]["hint"]
            return ApiError(400, f"there is no field {'.'.join(place)[:MAX_NAME]!r}{hint}", param=place[0][:MAX_NAME])
    # A place has problems of its own and further ones inside it only where it is a union, and the alternative that was
    # read furthest is the one that was meant.
    inside = [other for each in problems if (other := _place(each, body))[: len(place)] == place]
    place = max(inside, key=len)
    said = dict.fromkeys(problem["msg"] for problem in problems if _place(problem, body) == place)
    return ApiError(400, f"{'.'.join(place) or 'the body'}: {', or '.join(list(said)[:3])}"[:500], param=param)


def check_query(given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse parameters of a query that a route does not have."""
    for name in given:
        if name not in known:
            raise ApiError(400, f"there is no parameter {shown(name)}{did_you_mean(name, known)}",
                           param=name[:MAX_NAME])


def truth(name: str, given: str) -> bool:
    """Read a query parameter that must be "true" or "false"."""
    value = TRUTHS.get(given.lower())
    if value is None:
        raise ApiError(400, f"{name} must be true or false, got {shown(given)}", param=name)
    return value


def _place(problem: Problem, body: Any) -> list[str]:
    """Return the path to a problem in the body, without the names of union members that pydantic adds to it."""
    place, value, parts = list[str](), body, problem["loc"][1:]  # behind "body"
    for index, part in enumerate(parts):
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            place.append(str(part))
            value = value[part]
        elif problem["type"] == "missing" and index == len(parts) - 1:  # a field that is null is read as missing, too
            place.append(str(part))
    return place
