from __future__ import annotations

import random

import pytest

from outrider.cli import build_parser
from outrider.commands.golden_acceptance import AT_ONE_NUMBER, BY_NUM_DRAFTS, NAMES, golden_rates
from outrider.commands.parser import UsageError, engine_config


def drawn_length(rates: list[float], runs: int = 200_000) -> float:
    """The mean run when each draft is accepted at its rate, up to the first that is not."""
    chance = random.Random(1)
    total = 0
    for _ in range(runs):
        total += 1
        for rate in rates:
            if chance.random() >= rate:
                break
            total += 1
    return total / runs


def lengths() -> list[tuple[str, int, float]]:
    several = [(name, k + 1, length) for name, row in BY_NUM_DRAFTS.items() for k, length in enumerate(row)]
    return several + [(name, k, length) for name, (k, length) in AT_ONE_NUMBER.items()]


@pytest.mark.parametrize("name,num_drafts,length", lengths())
def test_runs_at_the_rates_have_the_length(name: str, num_drafts: int, length: float) -> None:
    rates = golden_rates(f"golden:{name}", num_drafts)
    assert len(rates) == num_drafts and all(0 < rate < 1 for rate in rates)
    assert drawn_length(rates) == pytest.approx(length, abs=0.02)


def test_the_flag_becomes_rates_of_the_drafter() -> None:
    words = ["bench", "spec", "smollm2", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
    config = engine_config(build_parser().parse([*words, "--acceptance", "golden"]))
    assert config.speculative is not None
    assert config.speculative.synthetic_rates == pytest.approx((0.93, 0.8 / 0.93))


@pytest.mark.parametrize("given,num_drafts,message", [
    ("golden:kimi", 3, NAMES[0]), ("silver", 3, "neither golden nor"), ("golden", 9, "up to 8 drafts"),
    ("golden:kimi-k3-dspark", 3, "set num_speculative_tokens to 4"),
])
def test_what_is_not_known_is_refused(given: str, num_drafts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        golden_rates(given, num_drafts)


@pytest.mark.parametrize("drafts,message", [("auto", "needs --speculative-config"),
                                            ('{"method": "ngram"}', "with num_speculative_tokens")])
def test_the_flag_needs_a_number_of_drafts(drafts: str, message: str) -> None:
    args = build_parser().parse(["bench", "spec", "smollm2", "--speculative-config", drafts, "--acceptance", "golden"])
    with pytest.raises(UsageError, match=message):
        engine_config(args)
