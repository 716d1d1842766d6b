"""Golden acceptance: mean tokens per step that benchmarks have agreed on, by model and number of drafts.

An engine that accepts drafts at these rates can be compared with the figures that InferenceX publishes. The values are
from its tables of 2026-11.
"""

from __future__ import annotations

from collections.abc import Sequence

GOLDEN = "golden"
DEFAULT = "qwen3.5-mtp"
BY_NUM_DRAFTS: dict[str, tuple[float, ...]] = {  # tokens a step with 1, 2, 3 ... drafts
    DEFAULT: (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21),
    "glm-5.2-mtp": (1.84, 2.50, 2.99, 3.33),
}
AT_ONE_NUMBER: dict[str, tuple[int, float]] = {  # drafts and the tokens a step that are known for them alone
    "minimax-m3-eagle3": (4, 3.11), "kimi-k3-dspark": (4, 3.22), "deepseek-v4-pro-dspark": (6, 3.77),
}
NAMES = (*BY_NUM_DRAFTS, *AT_ONE_NUMBER)


def golden_rates(given: str, num_drafts: int) -> list[float]:
    """Return, for each draft, the rate at which it is accepted if all drafts before it are. `given`: "golden", or
    "golden:NAME"."""
    kind, _, name = given.partition(":")
    name = name or DEFAULT
    if kind != GOLDEN or name not in NAMES:
        raise ValueError(f"--acceptance: {given!r} is neither golden nor golden:NAME with a name of {', '.join(NAMES)}")
    if name in AT_ONE_NUMBER:
        known, length = AT_ONE_NUMBER[name]
        if num_drafts != known:
            raise ValueError(f"--acceptance: the length of {name} is known for {known} drafts: set "
                             f"num_speculative_tokens to {known}, not {num_drafts}")
        return [_equal_rate(known, length)] * known
    lengths = BY_NUM_DRAFTS[name]
    if num_drafts > len(lengths):
        raise ValueError(f"--acceptance: lengths of {name} are known for up to {len(lengths)} drafts: lower "
                         f"num_speculative_tokens, which is {num_drafts}")
    return _rates((1.0, *lengths[:num_drafts]))


def _rates(lengths: Sequence[float]) -> list[float]:
    """Return the acceptance rates that follow from the mean runs with 0, 1, 2 ... drafts. Each draft lengthens the mean
    run by the share of steps that accept it."""
    shares = [1.0, *(longer - shorter for shorter, longer in zip(lengths, lengths[1:], strict=False))]
    return [after / before for before, after in zip(shares, shares[1:], strict=False)]


def _equal_rate(num_drafts: int, length: float) -> float:
    """Return the rate that gives this mean run if it is the same for every draft."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**power for power in range(num_drafts + 1)) < length:
            low = middle
        else:
            high = middle
    return low
