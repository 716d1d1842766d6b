"""Two runs of one request that part: where, with which scores, and whether that is a near-tie or a fault.

The tokens before the difference are given to the model once more, as a prompt by itself. There the scores of the two
tokens lie within what rounding moves in the model's type: a near-tie. Or one run has taken a token that the model does
not favour: a fault. Scores are log-probabilities, and for sampled requests divided by the temperature with the noise of
their key added. So nothing has to come again, and the run that is judged may use steps that know no log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.commands.run_prompts import Ask
from outrider.engine.text import Tokenizer
from outrider.sample.philox import gumbel

# How far rounding moves two scores against each other. In bfloat16 single logits of SmolLM2 were seen to move by 0.27
# between batches; the others go by their digits.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.3, "float16": 0.04}


def differences(reference: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(request, position) of the first difference of every request that differs."""
    found = []
    for index, (theirs, ours) in enumerate(zip(reference, tokens, strict=True)):
        if list(theirs) != list(ours):
            shorter = min(len(theirs), len(ours))
            found.append((index, next((i for i in range(shorter) if theirs[i] != ours[i]), shorter)))
    return found


@dataclass(frozen=True)
class Difference:
    request: int
    position: int  # of the outputs
    is_greedy: bool
    tokens: tuple[int | None, int | None]  # the reference's, the other's; None where a run had ended
    scores: tuple[float, float]  # of the two
    tolerance: float

    @property
    def apart(self) -> float:
        return abs(self.scores[0] - self.scores[1])

    @property
    def is_near_tie(self) -> bool:
        return self.apart <= self.tolerance  # not, if it is no number


def explain(index: int, position: int, ask: Ask, tokens: tuple[int | None, int | None],
            logprobs: Mapping[int, float], dtype: str) -> Difference:
    """logprobs: of the step, after the tokens that both runs have."""
    first, second = tokens
    scores = (float("nan"), float("nan"))
    if first is not None and second is not None:  # else no arithmetic explains it: a token that ends a run is one
        heat = ask.params.temperature or 1.0
        noise = noise_of(ask, len(ask.token_ids) + position, (first, second))
        scores = (logprobs[first] / heat + noise[0], logprobs[second] / heat + noise[1])
    return Difference(index, position, ask.params.is_greedy, tokens, scores, TOLERANCE[dtype])


def noise_of(ask: Ask, position: int, tokens: Sequence[int]) -> list[float]:
    """What the sampler adds to these tokens' logits there."""
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
