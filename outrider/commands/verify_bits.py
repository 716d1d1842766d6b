"""`outrider verify --exact`: log-probabilities compared bit for bit, beside tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.commands.run_prompts import Ask
from outrider.core import RequestOutput

LIKELIEST = 20  # tokens whose log-probabilities are compared at every place, beside the chosen one

# The log-probabilities of one request: for each output token, those of the chosen and of the likeliest tokens. All
# logits of the vocabulary enter each, by the sum that divides.
Bits = list[dict[int, float]]


def asking_for_bits(asks: Sequence[Ask], vocab_size: int) -> list[Ask]:
    num = min(LIKELIEST, vocab_size)
    return [replace(ask, params=replace(ask.params, logprobs=num)) for ask in asks]


def bits_of(outputs: Sequence[RequestOutput]) -> list[Bits]:
    samples = [output.outputs[0] for output in outputs]
    return [[{token: named.logprob for token, named in place.items()} for place in sample.logprobs or []]
            for sample in samples]


def describe_bits(reference: Sequence[Bits], found: Sequence[Bits]) -> tuple[int, str]:
    """Return (requests whose bits differ, a description of the first difference)."""
    differing = [index for index, (one, other) in enumerate(zip(reference, found, strict=True)) if one != other]
    if not differing:
        return 0, ""
    first = differing[0]
    places = zip(reference[first], found[first], strict=False)
    place, one, other = next(((i, a, b) for i, (a, b) in enumerate(places) if a != b), (0, {}, {}))
    token = next((token for token in one if one[token] != other.get(token)), -1)
    return len(differing), (f"request {first}, token {place}: the log-probability of token id {token} is "
                            f"{one.get(token)!r} in the reference and {other.get(token)!r} here")


def summary(num_tokens: int, num_runs: int, num_differing: int, happened: Sequence[str]) -> str:
    """Return one line that tells the user the result. happened: the events that occurred in some run."""
    if num_differing:
        return f"exact: {num_differing} requests differ in bits"
    return (f"exact: {num_tokens} tokens in {num_runs} runs ({', '.join(happened)}) have the log-probabilities of the "
            "same requests alone, bit for bit")
