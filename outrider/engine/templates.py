"""Renders chat templates. They are Jinja code from a model or a caller, so they run in a sandbox and within limits.

A template's time, loop rounds, calls and lengths of texts are bounded. Every error in a template is raised as a
ChatTemplateError. Rendering may take seconds, so it must not run in an event loop.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from outrider.core.fields import did_you_mean
from outrider.engine.messages import ChatTemplateError, Message

MAX_SECONDS = 5.0
MAX_ROUNDS = 1_000_000  # most rounds of all loops, and calls, of one rendering
ROUNDS_TO_PAUSE = 100  # after so many a rendering lets other threads go on
PAUSE_SECONDS = 5e-5
MAX_LENGTH = 10_000_000  # characters of a text, or items of a list
MAX_BITS = 10_000  # most bits of an integer


class ChatTemplate:
    """A compiled template. Several threads may render it at once."""

    def __init__(self, text: str) -> None:
        self._env = _Sandbox()
        try:
            self._template = self._env.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is not valid (line {error.lineno}): {error.message}") from error
        except Exception as error:  # raised by Jinja's parser or Python's compiler: too deep, a number too long
            raise ChatTemplateError(f"the chat template is not valid: {_told(error)}") from error
        self._variables = find_undeclared_variables(self._env.parse(text))

    def check_variables(self, names: Iterable[str]) -> None:
        """Raise ChatTemplateError for a variable that the template does not use."""
        for name, why in self.unused(names).items():
            raise ChatTemplateError(f"{name} is not supported: {why}")

    def unused(self, names: Iterable[str]) -> dict[str, str]:
        """Return the variables that the template does not use, each with a message that says so and names a similar one
        that may be meant."""
        return {name: f"the model's chat template does not use it{did_you_mean(name, self._variables)}"
                for name in names if name not in self._variables}

    def render(self, messages: Iterable[Message], add_generation_prompt: bool, values: Mapping[str, Any]) -> str:
        variables = {**values, "messages": messages, "add_generation_prompt": add_generation_prompt}
        self._env.start()
        try:
            return self._env.joined(self._template.generate(variables))
        except ChatTemplateError:
            raise
        except Exception as error:
            raise ChatTemplateError(f"the chat template refused the messages: {_told(error)}; change the messages, or "
                                    "pass another template as chat_template=") from error


@lru_cache(maxsize=16)
def compiled_template(text: str) -> ChatTemplate:
    return ChatTemplate(text)  # compiling costs milliseconds, and a server renders the same one for every chat


class _Sandbox(ImmutableSandboxedEnvironment):
    """Runs templates within limits: counts the loop rounds and calls of each thread's template, and measures the texts
    that it makes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False,  # constants are computed in `render`
                         extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self._used = threading.local()
        self.filters |= {"tojson": _tojson, "counted": self._counted, "joined": self.joined}
        self.filters = {name: self._measured(call) for name, call in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.concat = self.joined  # type: ignore[method-assign]  # of the parts of a block, a macro or a capture

    def start(self) -> None:
        self._used.rounds, self._used.deadline = 0, time.monotonic() + MAX_SECONDS

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._tick()
        return self._measure(super().call(*args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Carry out an operation with two operands, unless the estimated size of its result is too large. Such an
        operation might never end."""
        bits = [v.bit_length() if isinstance(v, int) else 0 for v in (left, right)]
        lengths = [len(v) if isinstance(v, Sized) else 0 for v in (left, right)]
        match operator:
            case "+":
                size = sum(lengths)
            case "*":
                size = max(lengths[0] * (right if bits[1] else 1), lengths[1] * (left if bits[0] else 1))
            case "%" if isinstance(left, str) and re.search(r"[\d*]{7}", left):  # '%9999999999d'
                size = MAX_LENGTH + 1
            case _:
                size = 0
        power = right if operator == "**" and isinstance(right, int) else 1
        if size > MAX_LENGTH or max(sum(bits), bits[0] * power) > MAX_BITS:
            raise _too_much(f"a result of {operator} that is too large")
        return super().call_binop(context, operator, left, right)

    def joined(self, parts: Iterable[Any]) -> str:
        texts, length = [], 0
        for part in parts:
            texts.append(str(part))
            length += len(texts[-1])
            if length > MAX_LENGTH:
                raise _too_much(f"a text of more than {MAX_LENGTH} characters")
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Guards().visit(super()._parse(source, name, filename))

    def _counted(self, items: Any) -> _Counted:
        return _Counted(items, self._tick)

    def _tick(self) -> None:
        self._used.rounds += 1
        if self._used.rounds > MAX_ROUNDS:
            raise _too_much(f"more than {MAX_ROUNDS} loop rounds and calls")
        if time.monotonic() > self._used.deadline:
            raise _too_much(f"more than {MAX_SECONDS:g} seconds")
        if self._used.rounds % ROUNDS_TO_PAUSE == 0:
            # Otherwise another thread waits 5 ms for Python's lock each time, and a step of the engine takes it often.
            time.sleep(PAUSE_SECONDS)

    def _measure(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple, dict)) and len(value) > MAX_LENGTH:
            raise _too_much(f"a value of more than {MAX_LENGTH} characters or items")
        return self._counted(value) if isinstance(value, Iterator) else value

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)  # with the marks that Jinja puts on filters
        def measured(*args: Any, **kwargs: Any) -> Any:
            return self._measure(call(*args, **kwargs))

        return measured


class _Guards(NodeTransformer):
    """Changes a template so that every loop counts its rounds and every concatenation measures its text: a template
    cannot run for ever or fill the memory."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered("joined", nodes.List(node.nodes, lineno=node.lineno))


class _Counted:
    """The items of a template's loop, with every round of the loop counted. `loop.length` and `loop.last` need its
    length, which is known if the items have one."""

    def __init__(self, items: Any, tick: Callable[[], None]) -> None:
        self._items, self._tick = items, tick

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._tick()
            yield item

    def __bool__(self) -> bool:  # a filter of Jinja asks, also of a generator, which has no length
        return bool(self._items)

    def __len__(self) -> int:
        return len(self._items)


class _GenerationTag(Extension):
    """The tag {% generation %}, which marks the assistant's words for training. Here it only renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return caller()


def _filtered(name: str, value: Any) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _too_much(what: str) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template was stopped: it takes {what}. Shorten the messages, or pass another "
                             "template as chat_template=")


def _told(error: Exception) -> str:
    """Return the message for an error, with the error's type unless the template raised the error on purpose."""
    return str(error) if type(error) is jinja2.TemplateError else f"{type(error).__name__}: {error}"
