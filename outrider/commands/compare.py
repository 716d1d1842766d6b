"""Explains the first difference of two runs of one request: a near-tie of arithmetic, or a fault.

The tokens before the difference are given to the model once more, as a prompt. If the scores of the two tokens differ
by no more than rounding moves them in the model's dtype, the difference is a near-tie; otherwise one run has taken a
token that the model does not favour, which is a fault. Scores are log-probabilities. For sampled requests they are
divided by the temperature, and the noise of the sampling key is added. Scores are computed afterwards, so the run
itself need not report log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.commands.run_prompts import Ask
from outrider.engine.text import Tokenizer
from outrider.sample.philox import gumbel

# How far rounding moves two scores against each other. In bfloat16 single logits of SmolLM2 were seen to move by 0.27
# between batches; the other values follow from the number of digits.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.3, "float16": 0.04}


def differences(reference: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return (request, position of the first difference) for every request whose tokens differ."""
    found = []
    for index, (theirs, ours) in enumerate(zip(reference, tokens, strict=True)):
        if list(theirs) != list(ours):
            shorter = min(len(theirs), len(ours))
            found.append((index, next((i for i in range(shorter) if theirs[i] != ours[i]), shorter)))
    return found


@dataclass(frozen=True)
class Difference:
    request: int
    position: int  # index of the output token
    is_greedy: bool
    tokens: tuple[int | None, int | None]  # the reference's and the other run's; None if a run had ended
    scores: tuple[float, float]  # scores of the two tokens
    tolerance: float

    @property
    def apart(self) -> float:
        return abs(self.scores[0] - self.scores[1])

    @property
    def is_near_tie(self) -> bool:
        return self.apart <= self.tolerance  # False if it is NaN


def explain(index: int, position: int, ask: Ask, tokens: tuple[int | None, int | None],
            logprobs: Mapping[int, float], dtype: str) -> Difference:
    """Score the two tokens at a difference. logprobs: the log-probability of every token after the tokens that both
    runs share."""
    first, second = tokens
    scores = (float("nan"), float("nan"))
    if first is not None and second is not None:  # a run that ended has a token for its end, so arithmetic is no excuse
        temperature = ask.params.temperature or 1.0
        noise = noise_of(ask, len(ask.token_ids) + position, (first, second))
        scores = (logprobs[first] / temperature + noise[0], logprobs[second] / temperature + noise[1])
    return Difference(index, position, ask.params.is_greedy, tokens, scores, TOLERANCE[dtype])


def noise_of(ask: Ask, position: int, tokens: Sequence[int]) -> list[float]:
    """Return the noise that the sampler adds to the logits of these tokens at the position."""
    if ask.params.is_greedy:
        return [0.0] * len(tokens)
    seed, index, at = (torch.tensor([value]) for value in (ask.params.seed or 0, 0, position))
    return gumbel(seed, index, at, torch.tensor(tokens), len(tokens), torch.float32)[0].tolist()


def describe(found: Difference, tokenizer: Tokenizer | None) -> str:
    def name(token: int | None) -> str:
        if token is None:
            return "no token (the run had ended)"
        text = "" if tokenizer is None else f" {tokenizer.decode([token], skip_special_tokens=False)!r}"
        return f"{token}{text}"

    kind = "greedy" if found.is_greedy else "sampled"
    first, second = found.tokens
    head = f"request {found.request} ({kind}), output token {found.position}: "
    if first is None or second is None:
        return head + f"reference {name(first)}, here {name(second)}: a fault"
    one, other = found.scores
    verdict = "a near-tie of arithmetic" if found.is_near_tie else "a fault"
    return (head + f"reference {name(first)}, here {name(second)}\n"
            f"  scores of the two tokens {one:.6f} and {other:.6f}, apart {found.apart:.2e}, "
            f"tolerance {found.tolerance:g}: {verdict}")
