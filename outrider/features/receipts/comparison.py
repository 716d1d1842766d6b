"""Compares a receipt with the receipt of a second computation: whether they are equal, and if not, what differs and at
which token the first difference is."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from outrider.core.file_digests import canonical
from outrider.features.receipts.receipt import Receipt, leaves

EQUAL, ROUNDING, DIFFERENT, REFUSED = "equal", "equal up to rounding", "different", "refused"
# Names that change no bit, and versions that count updates of one engine.
NOT_COMPARED = ("model.name", "weights_versions", "output.logprobs_start")
TOLERANCES = {"float32": 1e-3, "float64": 1e-3}  # of log-probabilities without exact mode, by dtype; others: 0.1
WIDE = 0.1


@dataclass(frozen=True)
class Verdict:
    """The result of computing a receipt's tokens again."""

    verdict: str
    num_tokens: int = 0  # whose ids were compared
    num_logprobs: int = 0  # of the last tokens, whose log-probabilities were compared too
    findings: list[str] = field(default_factory=list)  # fields that do not fit, and the first token that differs
    notes: list[str] = field(default_factory=list)  # what could not be checked

    @property
    def is_equal(self) -> bool:
        return self.verdict in (EQUAL, ROUNDING) and not self.findings


def compare(receipt: Receipt, again: Receipt) -> Verdict:
    """The verdict on a receipt. again: the receipt of the same request, computed by another engine."""
    notes, findings = [], _differing_fields(receipt, again)
    if receipt["model"]["weights"] is None:
        notes.append("model.weights: they came by an update, so MODEL is taken at your word")
    num_tokens, num_logprobs = (len(again["output"][name]) for name in ("token_ids", "logprobs"))
    num_logprobs = min(num_logprobs, len(receipt["output"]["logprobs"]))
    if num_logprobs < num_tokens:
        notes.append(f"output.logprobs: of the first {num_tokens - num_logprobs} tokens only ids were compared: the "
                     "receipt has no log-probabilities of them")
    difference = _first_difference(receipt["output"], again["output"])
    if difference is None:
        verdict = EQUAL
    elif not receipt["exact"] and _is_rounding(receipt, again):
        verdict = ROUNDING
        notes.append(f"{difference}: a receipt without exact mode promises no bits")
    else:
        verdict = DIFFERENT
        findings.append(difference)
        if not receipt["exact"]:
            notes.append("exact: false: rounding may decide between tokens that are nearly as likely, so a difference "
                         "proves nothing")
    return Verdict(verdict if not findings or verdict != EQUAL else DIFFERENT, num_tokens, num_logprobs, findings,
                   notes)


def _differing_fields(receipt: Receipt, again: Receipt) -> list[str]:
    """Describe which fields, other than tokens and log-probabilities, differ in the second computation."""
    before, after = leaves(receipt), leaves(again)
    if receipt["adapter"] and again["adapter"]:
        after["adapter.name"] = before.get("adapter.name")
    if receipt["model"]["weights"] is None:
        after["model.weights"] = None
    found = []
    for path in dict.fromkeys((*before, *after)):
        if path in (*NOT_COMPARED, "output.token_ids", "output.logprobs"):
            continue
        if path not in before or path not in after:
            found.append(f"{path}: only {'the receipt' if path in before else 'this computation'} has it")
        elif canonical(before[path]) != canonical(after[path]):
            found.append(f"{path}: the receipt says {_shown(before[path])}, here it is {_shown(after[path])}")
    return found


def _first_difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Describe the first position at which the tokens or the bits of their log-probabilities differ."""
    start = before["logprobs_start"]
    ones, others = _entries(before, start), _entries(after, start)
    for index in range(max(len(ones), len(others))):
        one = ones[index] if index < len(ones) else None
        other = others[index] if index < len(others) else None
        if one is None or other is None:
            return f"token {index}: {_token(one, 'the receipt')}, {_token(other, 'this computation')}"
        if one[0] != other[0] or _bits(one[1]) != _bits(other[1]):
            return f"token {index}: {_token(one, 'the receipt')}, {_token(other, 'this computation')}"
    return None


def _entries(output: dict[str, Any], start: int) -> list[tuple[int, float | None]]:
    """Each token with its log-probability, which is None for tokens before `start`."""
    missing = output["logprobs_start"]
    return [(token, None if index < start else output["logprobs"][index - missing])
            for index, token in enumerate(output["token_ids"])]


def _bits(logprob: float | None) -> bytes | None:
    return None if logprob is None else struct.pack("<d", logprob)


def _token(entry: tuple[int, float | None] | None, whose: str) -> str:
    if entry is None:
        return f"{whose} has ended"
    return f"{whose} has id {entry[0]}" + ("" if entry[1] is None else f" with log-probability {entry[1]!r}")


def _is_rounding(receipt: Receipt, again: Receipt) -> bool:
    """Whether the tokens are equal and their log-probabilities nearly so."""
    before, after = receipt["output"], again["output"]
    start = before["logprobs_start"]
    pairs = zip(_entries(before, start), _entries(after, start), strict=False)
    allowed = TOLERANCES.get(receipt["settings"].get("dtype"), WIDE)
    return before["token_ids"] == after["token_ids"] and all(
        one is None or other is None or abs(one - other) <= allowed for (_, one), (_, other) in pairs)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
