"""Joins the metrics of all replicas into one page. Every sample has the label `engine` with the number of its replica,
as in vLLM with several engines. The sum over `engine` is the value of the whole server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

ENGINE = re.compile(r'(?<=[{,])engine="\d+"')
WITHOUT_LABELS = re.compile(r"^(\w+) ")


def joined_metrics(pages: Mapping[int, str], restarts: Mapping[int, int]) -> str:
    """Join the replicas' metrics in Prometheus' text form. `pages`: the metrics of the replicas that answered.
    `restarts`: how often each replica was restarted; empty if restarts are counted elsewhere."""
    families: dict[str, list[str]] = {}  # lines by the line that begins their family
    for number, page in pages.items():
        own: list[str] = []
        for line in page.removesuffix("\n").split("\n"):  # a model's name may hold other ends of lines
            if line.startswith("# HELP"):
                own = families.setdefault(line, [])
            elif line.startswith("#"):
                own += [line] if line not in own else []
            else:
                own.append(_with_engine(line, number))
    lines = [text for head, rest in families.items() for text in (head, *rest)]
    if restarts:
        lines += _family("replica_up", "gauge", "1 for a replica that answers.", {i: int(i in pages) for i in restarts})
        lines += _family("replica_restarts_total", "counter", "Times a replica was started again.", restarts)
    return "\n".join(lines) + "\n"


def _with_engine(line: str, number: int) -> str:
    label = f'engine="{number}"'
    named = ENGINE.sub(label, line, count=1)
    return named if named != line or label in line else WITHOUT_LABELS.sub(rf"\1{{{label}}} ", line)


def _family(name: str, kind: str, help_text: str, values: Mapping[int, int]) -> Iterable[str]:
    yield f"# HELP vllm:{name} {help_text}"
    yield f"# TYPE vllm:{name} {kind}"
    for number, value in values.items():
        yield f'vllm:{name}{{engine="{number}"}} {value}'
