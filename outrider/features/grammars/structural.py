"""Structural tags: free text in which marked parts must follow a schema. Writes them as a Lark grammar, from either of
vLLM's two spellings:

{"structures": [{"begin": "<f>", "schema": {..}, "end": "</f>"}], "triggers": ["<f"]}
{"format": {"type": "triggered_tags", "triggers": [..], "tags": [{"begin": .., "content": {..}, "end": ..}]}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

ANY_TEXT = "/(?s:.*)/"
MAX_PAIRS = 10_000
JSON_TYPES: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
KINDS = ("const_string", "json_schema", "regex", "grammar", "any_text", "sequence", "or", "tag", "triggered_tags",
         "tags_with_separator")


def structural_grammar(tag: str, to_lark: Callable[[str], str], json_options: dict[str, Any]) -> str:
    """The Lark grammar of a structural tag. `tag`: the tag as JSON. `to_lark`: converts a grammar inside the tag to
    Lark. Raises ValueError that names the field that is wrong."""
    given = json.loads(tag)
    if "structures" in given:
        tags = [{"begin": _field(each, "begin", str), "end": _field(each, "end", str),
                 "content": {"type": "json_schema", "json_schema": each.get("schema")}}
                for each in _field(given, "structures", list)]
        given = {"format": {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}}
    builder = _Builder(to_lark, json_options)
    start = builder.expression(_field(given, "format", dict))
    return "\n".join([f"start: {start}", *builder.rules])


def regex_terminal(pattern: str) -> str:
    """Write a regular expression as a terminal of a Lark grammar: between slashes."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def _field(given: Any, name: str, kind: type) -> Any:
    if not isinstance(given, dict) or not isinstance(given.get(name), kind):
        type_of = given.get("type", "?") if isinstance(given, dict) else "?"
        raise ValueError(f"each object of type {type_of!r} needs the field {name!r}, which is {JSON_TYPES[kind]}")
    return given[name]


class _Builder:
    """Builds the text of a grammar. It collects rules, and expressions refer to them by name."""

    def __init__(self, to_lark: Callable[[str], str], json_options: dict[str, Any]) -> None:
        self.rules: list[str] = []
        self._to_lark, self._json_options = to_lark, json_options

    def expression(self, form: dict[str, Any]) -> str:
        match _field(form, "type", str):
            case "const_string":
                return _text(_field(form, "value", str))
            case "json_schema":
                schema = form.get("json_schema")
                schema = schema if isinstance(schema, dict) else {}
                return self._rule(f"%json {json.dumps(schema | {'x-guidance': self._json_options})}")
            case "regex":
                return self._rule(regex_terminal(_field(form, "pattern", str)))
            case "grammar":
                return self._rule(f"%lark {{\n{self._to_lark(_field(form, 'grammar', str))}\n}}")
            case "any_text":
                return self._rule(ANY_TEXT)
            case "sequence":
                return self._group(form, "elements", " ")
            case "or":
                return self._group(form, "elements", " | ")
            case "tag":
                return self._tag(form, _field(form, "begin", str))
            case "triggered_tags":
                return self._triggered(form)
            case "tags_with_separator":
                return self._separated(form)
            case other:
                raise ValueError(f"the type {other[:40]!r} is not supported; supported: {', '.join(KINDS)}")

    def _group(self, form: dict[str, Any], name: str, between: str) -> str:
        return f"({between.join(self.expression(each) for each in _some(form, name))})"

    def _tag(self, tag: Any, begin: str) -> str:
        """The expression for a tag. `begin`: the part of the tag's beginning that has not been written yet."""
        return f"({_text(begin)} {self._behind_begin(tag)})"

    def _behind_begin(self, tag: Any) -> str:
        content, end = _field(tag, "content", dict), _field(tag, "end", str)
        if content.get("type") == "any_text" and end:
            return self._rule(ANY_TEXT, end)
        return f"{self.expression(content)} {_text(end)}"

    def _triggered(self, form: dict[str, Any]) -> str:
        """The grammar expression for free text with tags. When the text contains a trigger, it continues as a tag that
        begins with this trigger."""
        triggers, chunks = _some(form, "triggers"), []
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ValueError("triggers must be texts that are not empty")
        # What follows a tag's beginning is written once, however many triggers the tag has.
        tags = [(_field(tag, "begin", str), self._rule(self._behind_begin(tag))) for tag in _some(form, "tags")]
        num_pairs = 0
        for trigger in dict.fromkeys(triggers):
            rests = [f"{_text(begin.removeprefix(trigger))} {behind}" for begin, behind in tags
                     if begin.startswith(trigger)]
            if not rests:
                raise ValueError(f"no tag begins with the trigger {trigger[:40]!r}: add such a tag, or remove the "
                                 "trigger")
            num_pairs += len(rests)
            if num_pairs > MAX_PAIRS:
                raise ValueError(f"there are more than {MAX_PAIRS} pairs of a trigger and a tag that begins with it: "
                                 "give fewer triggers or tags")
            chunks.append(f"{self._rule(ANY_TEXT, trigger)} ({' | '.join(rests)})")
        chunk = self._rule(" | ".join(chunks))
        if form.get("stop_after_first"):
            return chunk if form.get("at_least_one") else f"({chunk} | {self._rule(ANY_TEXT)})"
        return f"({chunk}{'+' if form.get('at_least_one') else '*'} {self._rule(ANY_TEXT)})"

    def _separated(self, form: dict[str, Any]) -> str:
        tag = self._rule(" | ".join(self._tag(tag, _field(tag, "begin", str)) for tag in _some(form, "tags")))
        more = "" if form.get("stop_after_first") else f" ({_text(_field(form, 'separator', str))} {tag})*"
        return f"({tag}{more}){'' if form.get('at_least_one') else '?'}"

    def _rule(self, body: str, suffix: str = "") -> str:
        """Add a rule and return its name. `suffix`: the text that ends the rule at its first occurrence."""
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{f'[suffix={json.dumps(suffix)}]' if suffix else ''}: {body}")
        return name


def _some(form: dict[str, Any], name: str) -> list[Any]:
    given = _field(form, name, list)
    if not given:
        raise ValueError(f"{name} must be a list that is not empty")
    return list(given)


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
