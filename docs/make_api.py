"""Writes docs/api.md, the reference of the public names, from their signatures and docstrings.

    python docs/make_api.py            writes the file; tests/unit/test_api_reference.py compares it
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import outrider
from outrider.commands.parser import ENGINE_HELP, SAMPLING_HELP
from outrider.config import SpeculativeConfig
from outrider.core.outputs import Logprob, RequestMetrics

HEAD = """# API reference

Made by `python docs/make_api.py` from the docstrings. Everything here is imported from `outrider`; the names of vLLM
that lie elsewhere (`outrider.sampling_params`, `outrider.inputs`, `outrider.outputs`) are the same objects.
"""
# Public names of classes that the engine uses itself. They may change, and are left out.
INTERNAL = {
    "AsyncLLM": {"around", "check", "engine", "follow", "increments"},
    "CompletionOutput": {"add_logprobs", "logprobs"},
    "EmbeddingRequestOutput": {"from_pooled"},
    "EngineArgs": {"for_streams", "limits", "speculative", "steps_in_flight"},
    "LLM": {"around", "encode_chat", "engine"},
    "LLMEngine": {"around", "engine", "inside"},
    "PoolingParams": {"checked", "report"},
    "PoolingRequestOutput": {"copy", "cut_back", "fail", "grow", "num_output_tokens"},
    "RequestMetrics": {"observe_drafts"},
    "RequestOutput": {"copy", "cut_back", "empty", "fail", "grow", "num_output_tokens"},
    "SamplingParams": {"bad_words_token_ids", "effective_bias", "has_penalties", "is_greedy",
                       "is_plain", "max_drafts", "stop_strings"},
    "speculative_config": {"methods", "parse"},
    "StructuredOutputsParams": {"form", "from_fields", "is_json", "to_plain"},
}
# What the fields of some classes are for, where no comment stands behind them: the help of their flags.
NOTES = {"EngineArgs": ENGINE_HELP, "SamplingParams": SAMPLING_HELP}
ONLY_FLAGS = re.compile(r" \((repeat for several|with --json)\)|, as [\d,]+$")


def reference() -> str:
    parts = [HEAD]
    for name in sorted(outrider.__all__, key=str.lower):
        value = getattr(outrider, name)
        if inspect.isclass(value) and value.__name__ != name:
            parts.append(f"## `{name}`\n\nAnother name of `{value.__name__}`.\n")
        elif inspect.isclass(value):
            parts.append(_class(name, value))
        elif inspect.isfunction(value):
            parts.append("\n".join([f"## `{name}{_signature(value)}`", *_doc(value)]) + "\n")
    parts.append("# Parts of the above\n")
    parts.append(_class("speculative_config", SpeculativeConfig))
    parts += [_class(part.__name__, part) for part in (Logprob, RequestMetrics)]
    return "\n".join(parts)


def _class(name: str, value: type) -> str:
    hidden = INTERNAL.get(name, set())
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    lines = [f"## `{name}`", "", *_doc(value)]
    if fields:
        flags = {field: ONLY_FLAGS.sub("", text.replace("JSON object", "dict").replace("'{", "{").replace("}'", "}"))
                 for field, text in NOTES.get(name, {}).items()}
        notes = flags | _notes(value)
        lines += ["| field | default | |", "|---|---|---|"]
        lines += [f"| `{field.name}` | {_default(field)} | {notes.get(field.name, '')} |"
                  for field in fields if not field.name.startswith("_") and field.name not in hidden - {"logprobs"}]
        lines.append("")
    elif issubclass(value, dict):
        lines += [f"- `{key}`" + (" (optional)" if "NotRequired" in str(declared) else "")
                  for key, declared in inspect.get_annotations(value).items()]
    elif value.__init__ is not object.__init__:
        lines += [f"`{name}{_signature(value.__init__)}`", ""]
    for method, own in sorted(_members(value).items()):
        if method.startswith("_") or method in hidden or method in {field.name for field in fields}:
            continue
        function = own.__func__ if isinstance(own, (classmethod, staticmethod)) else own
        if inspect.isfunction(function) or isinstance(own, property):
            signature = "" if isinstance(own, property) else _signature(function)
            lines.append(": ".join([f"- `{method}{signature}`", *_doc(function)[:1]]))
    return "\n".join(lines).rstrip() + "\n"


def _members(value: type) -> dict[str, Any]:
    """The members that a class and its base classes in this package define."""
    own = [owner for owner in value.__mro__ if owner.__module__.startswith("outrider")]
    return {name: member for owner in reversed(own) for name, member in vars(owner).items()}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "a new one" if field.default_factory is not dataclasses.MISSING else "required"


def _signature(function: Any) -> str:
    """Names and defaults. Annotations are left to the source."""
    shown = []
    is_keyword = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls", "misplaced"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        is_keyword |= parameter.kind is parameter.VAR_POSITIONAL
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(shown)})"


def _doc(value: Any) -> list[str]:
    """The docstring and an empty line, if there is one."""
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if own is None or own.startswith(getattr(value, "__name__", "\0") + "("):  # what dataclass writes
        return []
    return [" ".join(inspect.cleandoc(own).split()), ""]


def _notes(value: type) -> dict[str, str]:
    """The comments behind the fields of a class and of those it inherits from."""
    found: dict[str, str] = {}
    for owner in reversed(value.__mro__[:-1]):
        source = inspect.getsource(owner) if owner.__module__.startswith("outrider") else ""
        found |= dict(re.findall(r"^    (\w+): .*?\s{2}# (.*)$", source, re.M))
    return found


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(reference())
