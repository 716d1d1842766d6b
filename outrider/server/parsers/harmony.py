"""Harmony (gpt-oss): every message has a channel. `analysis` is reasoning, `commentary to=functions.F` a call, the rest
content. The call's end token may be hidden, because it also ends the answer.
"""

from __future__ import annotations

import json
import re

from outrider.server.parsers.machine import Call, CallRegion, ReasoningRegion, Schemas, Skipped

_BODY = re.compile(r"([\w.:-]+)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>(.*)",
                   re.DOTALL)


def parse_harmony(body: str, schemas: Schemas) -> list[Call]:
    found = _BODY.fullmatch(body)
    if not found:
        raise ValueError("no call")
    arguments = json.loads(found[2] or "{}")
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return [Call.from_values(found[1], arguments)]


HARMONY_CALLS = (CallRegion("<|channel|>commentary to=functions.", "<|call|>", parse_harmony),
                 CallRegion("<|start|>assistant to=functions.", "<|call|>", parse_harmony))
HARMONY_THOUGHTS = (
    ReasoningRegion("<|channel|>analysis<|message|>", "<|end|>"), Skipped("<|start|>assistant"),
    Skipped("<|channel|>final<|message|>"), Skipped("<|channel|>commentary<|message|>"), Skipped("<|end|>"),
    Skipped("<|return|>"),
)  # fmt: skip
