"""Chat templates cannot run for ever, grow without end or fail with a raw error; real ones notice no limit."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.engine import templates
from outrider.engine.templates import ChatTemplateError, compiled_template

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def render(text: str, **values: Any) -> str:
    return compiled_template(text).render(CHAT, True, values)


def test_filters_can_follow_filters() -> None:
    text = ('{{ messages | selectattr("role", "eq", "user") | map(attribute="content") | first }}'
            '{{ messages | selectattr("role", "eq", "no") | map(attribute="content") | map("upper") | first | d(1) }}')
    assert render(text) == "hi1"


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "nested loops in a macro": "{% macro m() %}{% for a in range(99999) %}{{ range(99999) | list | length }}"
                               "{% endfor %}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "a loop with conditions": "{% for a in range(99999) if a >= 0 %}{% for b in range(99999) if b < 0 %}{% endfor %}"
                              "{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "slices without end": "{{ [1] | slice(10 ** 9) | list | length }}",
    "a text doubled by ~": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
                           "{% endfor %}",
    "a text doubled by +": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
                           "{% endfor %}",
    "a text doubled by join": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join %}"
                              "{% endfor %}",
    "a text doubled by a capture": "{% set n = namespace(s='x') %}{% for i in range(99) %}"
                                   "{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}",
    "a long text": "{{ 'x' * 10 ** 12 }}",
    "a long list": "{{ ([1] * 10 ** 10) | length }}",
    "a wide field": "{{ '%9999999999d' % 1 }}",
    "a large number": "{{ 10 ** (10 ** 10) }}",
    "a number squared again and again": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
                                        "{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_not_end_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match="chat template (was stopped: it takes|refused)"):
        render(ENDLESS[name])
    assert time.monotonic() - started < 60


def test_time_alone_stops_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(templates, "MAX_ROUNDS", 10**12)
    with pytest.raises(ChatTemplateError, match="more than 0.05 seconds.*Shorten the messages, or pass another"):
        render(ENDLESS["nested loops"])


def test_rounds_alone_stop_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 1000.0)
    with pytest.raises(ChatTemplateError, match="more than 1000000 loop rounds and calls"):
        render(ENDLESS["nested loops"])


FAULTS = {
    "syntax": ("{% if %}", r"not valid \(line 1\)"),
    "an unknown filter": ("{{ messages | shout }}", "not valid.*shout"),
    "too deep": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "not valid: RecursionError"),
    "a number of too many digits": ("{{ " + "1" * 5000 + " }}", "not valid: ValueError"),
    "an undefined value's attribute": ("{{ nothing.at.all }}", "refused the messages: UndefinedError"),
    "a type error": ("{{ messages[0].content + 1 }}", "refused the messages: TypeError"),
    "a division by zero": ("{{ 1 / 0 }}", "refused the messages: ZeroDivisionError"),
    "a missing index": ("{{ messages[9].content.x }}", "refused the messages: UndefinedError"),
    "a call of what is none": ("{{ messages() }}", "refused the messages: TypeError"),
    "its own refusal": ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
    "an escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused the messages: SecurityError"),
    "a change of the messages": ("{{ messages.append(1) }}", "refused the messages: SecurityError"),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refused the messages: RecursionError"),
    "another file": ("{% include 'x' %}", "refused the messages: TypeError"),
    "what JSON cannot write": ("{{ messages | map('upper') | tojson }}", "refused the messages: TypeError"),
    "a bad date": ("{{ strftime_now(5) }}", "refused the messages: TypeError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_one_kind_of_error_that_says_what_to_do(name: str) -> None:
    text, message = FAULTS[name]
    with pytest.raises(ChatTemplateError, match=message) as error:
        render(text)
    assert "not valid" in message or "pass another template as chat_template=" in str(error.value)


def test_loops_keep_what_templates_ask_of_them() -> None:
    text = ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}"
            "{{ loop.previtem.role if not loop.first else '-' }} {% else %}none{% endfor %}")
    assert render(text) == "1/2,- 2/2.user "
    assert render("{% for m in nothing %}x{% else %}none{% endfor %}") == "none"
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}") == "a1"
    assert render("{% for m in messages | reverse %}{{ loop.length }}{{ m.role }} {% endfor %}") == "2assistant 2user "
    assert render("{% for m in messages | rejectattr('role', 'eq', 'user') %}{{ loop.last }}{% endfor %}") == "True"
    tree = [{"n": 1, "kids": [{"n": 2, "kids": []}]}]
    assert render("{% for t in tree recursive %}{{ t.n }}{{ loop(t.kids) }}{% endfor %}", tree=tree) == "12"


def test_texts_and_numbers_are_put_together_as_ever() -> None:
    assert render("{{ 'a' ~ 1 ~ nothing ~ none }}") == "a1None"
    assert render("{{ 'a' * 3 + 'b' }} {{ 7 % 4 }} {{ '%s-%03d' % ('x', 5) }} {{ 2 ** 10 }} {{ 3 * 1.5 }}") == \
        "aaab 3 x-005 1024 4.5"
    assert render("{{ [1] + [2] }} {{ (messages | map(attribute='role') | list)[0] }}") == "[1, 2] user"


RICH = """{#- As templates of models with tools and thoughts are. -#}
{%- macro kind(p) -%}{%- if p.type is string -%}{{ p.type }}{%- elif p.items is defined -%}
list[{{ kind(p['items']) }}]{%- else -%}{{ p.type | map('upper') | join(' | ') }}{%- endif -%}{%- endmacro -%}
{%- macro wrapped(name) %}<{{ name }}>{{ caller() }}</{{ name }}>{% endmacro -%}
{%- set ns = namespace(first=true, last=-1, seen=[]) -%}
{%- for m in messages[::-1] %}{% if ns.last < 0 and m.role == 'user' %}
{%- set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}{% call wrapped('tools') %}{% for tool in tools if tool.name != 'hidden' %}
{{ loop.index }} of {{ loop.length }}: {{ tool | tojson(indent=2) }}
{%- for name, p in tool.parameters | dictsort %} {{ name }}: {{ kind(p) }}{{ ', ' if not loop.last }}{% endfor %}
{%- endfor %}{% endcall %}{% endif -%}
{%- for m in messages %}{% set content = m.content if m.content is string else '' %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}
{{- '<|' ~ m['role'] ~ '|>' + content | trim ~ ('!' * loop.index0) }}
{%- if m.tool_calls %}{% for call in m.tool_calls %}{{ '\n' ~ call.name ~ '(' }}{% for k, v in call.arguments.items() %}
{{- k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}){% endfor %}{% endif %}
{%- if loop.previtem is defined and loop.previtem.role == m.role %} (again){% endif %}
{%- set ns.seen = ns.seen + [m.role] %}{% if loop.index0 == ns.last %} <last>{% endif %}{% endfor %}
{{- ns.seen | unique | list | join(',') }}{% for row in [1, 2, 3, 4, 5] | batch(2, '-') %}{{ row | join }};{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '%s %02d' % ('n', 7) }}{% endif %}"""
TOOLS = [{"name": n, "parameters": {"b": {"type": "string"}, "a": {"type": ["int", "null"]},
                                    "c": {"items": {"type": "int"}}}} for n in ("one", "hidden", "two")]
LONG_CHAT = [
    {"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Sum?"}, {"role": "user", "content": "é"},
    {"role": "assistant", "content": "<think>hm</think>\n\nok", "tool_calls": [
        {"name": "sum", "arguments": {"x": [1]}}, {"name": "f", "arguments": {"a": 1, "b": {}}}]},
    {"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "6"},
]


def test_a_rich_template_renders_as_jinja_alone_renders_it() -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = templates._tojson
    for chat in (LONG_CHAT, LONG_CHAT[1:3], CHAT):
        for tools in (TOOLS, [], None):
            expected = plain.from_string(RICH).render(messages=chat, tools=tools, add_generation_prompt=True)
            assert compiled_template(RICH).render(chat, True, {"tools": tools}) == expected
    assert len(expected) > 60


def test_long_chats_are_well_within_the_limits() -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 2000
    text = "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | trim }}{% endfor %}"
    started = time.monotonic()
    assert len(compiled_template(text).render(messages, True, {})) == 2000 * 1006
    assert time.monotonic() - started < 30


def test_a_template_runs_in_several_threads_at_once() -> None:
    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(render, "{% for i in range(n) %}x{% endfor %}", n=n)
                                      for n in range(50)))

    assert list(map(len, asyncio.run(all_at_once()))) == list(range(50))
