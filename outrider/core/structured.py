"""StructuredOutputsParams: the grammar spec that a request's text must match, such as a JSON schema. Names follow vLLM.

This file only makes the checks that need no grammar library; `features/grammars/` compiles the spec before a request is
accepted.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from outrider.core.fields import NotEmpty, Text, check_fields, check_names

MAX_GRAMMAR_BYTES = 1 << 18  # most bytes of a schema, a regex, a grammar or all choices together
MAX_DEPTH = 100  # most objects and lists of a schema inside each other
INSTALL = "structured output needs the package llguidance: pip install 'outrider[grammar]'"
FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The grammar spec that a text must match. Exactly one field gives it: a JSON schema, a regular expression, a list
    of allowed texts, a grammar, any JSON object, or a structural tag. A structural tag is free text in which some parts
    must match a spec.

    JSON is written as `json.dumps` writes it, with one space behind each comma and colon."""

    json: str | dict[str, Any] | None = None  # a schema
    regex: Text | None = None
    choice: Annotated[list[Text], NotEmpty] | None = None
    grammar: Text | None = None  # in Lark's form, or GBNF
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None  # in either of vLLM's spellings
    disable_fallback: bool = False  # there is one grammar library, and nothing to fall back to
    disable_any_whitespace: bool = False  # no spaces behind commas and colons
    disable_additional_properties: bool = False  # objects have no properties but those that the schema names
    whitespace_pattern: Text | None = None  # a regular expression of the white space between the parts of JSON

    def __new__(cls, *args: Any, **fields: Any) -> StructuredOutputsParams:
        check_names("structured_outputs", cls, fields)
        return super().__new__(cls)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> StructuredOutputsParams:
        """Build the parameters from a JSON object. Raises ValueError for unknown names."""
        check_names("structured_outputs", cls, fields)
        return cls(**fields)

    def __post_init__(self) -> None:
        check_fields("structured_outputs.", self)
        if len(self._given) != 1:
            raise ValueError(f"structured_outputs must be exactly one of {', '.join(FORMS)}, got "
                             f"{' and '.join(self._given) or 'none'}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("structured_outputs: disable_any_whitespace leaves no use for whitespace_pattern: "
                             "give one of them")
        if not self.is_json and (self.whitespace_pattern is not None or self.disable_any_whitespace
                                 or self.disable_additional_properties):
            raise ValueError("structured_outputs: whitespace_pattern, disable_any_whitespace and "
                             "disable_additional_properties are for JSON: leave them out, or set json or json_object")

    @property
    def is_json(self) -> bool:
        return self.json is not None or bool(self.json_object)

    @property
    def form(self) -> str:
        """Return the name of the field that is set, such as "json" or "regex"."""
        return self._given[0]

    @property
    def where(self) -> str:
        """Return the name of the set field for error messages, such as "structured_outputs.json"."""
        return f"structured_outputs.{self.form}"

    @property
    def _given(self) -> list[str]:
        return [name for name in FORMS if getattr(self, name) not in (None, False)]

    def to_plain(self) -> StructuredOutputsParams:
        """Return a copy with plain texts of bounded size, which the caller cannot change. Raises ValueError if a text
        is too large."""
        own = self
        if self.json is not None:
            own = replace(self, json=self._json_text(self.json, "schema"))
        if self.structural_tag is not None:
            own = replace(self, structural_tag=self._json_text(self.structural_tag, "structural tag"))
        if self.choice is not None:
            own = replace(own, choice=list(self.choice))
        num_bytes = sum(len(text.encode()) for text in own._texts())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{self.where} has {num_bytes} bytes, and at most {MAX_GRAMMAR_BYTES} can be compiled: "
                             "make it shorter")
        return own

    def _texts(self) -> list[str]:
        form = getattr(self, self.form)
        texts = form if isinstance(form, list) else [form] if isinstance(form, str) else []
        return [*texts, self.whitespace_pattern or ""]

    def _json_text(self, given: str | dict[str, Any], kind: str) -> str:
        where = self.where
        try:
            if isinstance(given, str):
                if len(given) > MAX_GRAMMAR_BYTES:
                    return given  # refused for its size
                schema = json_text.loads(given)
            else:
                schema = given
            text = json_text.dumps(schema, allow_nan=False)
        except json_text.JSONDecodeError as error:
            raise ValueError(f"{where} is not valid JSON: {error}") from None
        except RecursionError:
            raise ValueError(f"{where}: objects and lists are nested more than {MAX_DEPTH} deep: make it "
                             "flatter") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where} cannot be written as JSON: {error}") from None
        if not isinstance(schema, dict):
            raise ValueError(f"{where} must be a {kind}: a JSON object")
        if _depth(schema) > MAX_DEPTH:
            raise ValueError(f"{where}: objects and lists are nested more than {MAX_DEPTH} deep: make it flatter")
        return text


def _depth(value: Any) -> int:
    """Return how deep objects and lists are nested."""
    depth, layer = 0, [value]
    while layer := [item for item in layer if isinstance(item, dict | list)]:
        depth += 1
        layer = [part for item in layer for part in (item.values() if isinstance(item, dict) else item)]
    return depth
