"""F4, batches as captured steps take them: padded to a graph's size, checkpoints as one integer per request, and their
pages listed in the rows. On the CPU nothing is captured; the same integers go through the same step.
"""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.params import SamplingParams
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, greedy, prompt_of, tokens_of
from tests.engine.recurrent_rig import HYBRIDS, StateRig, hybrid

K = 3
SHARED = prompt_of(0, 32)
ASKS = [
    Ask([*SHARED, *prompt_of(1, 13)], greedy(40)),
    Ask([*SHARED, *prompt_of(2, 9)], SamplingParams(temperature=1.0, seed=7, max_tokens=30)),
    Ask(prompt_of(3, 5), greedy(34)),
]


def run(family: str, *, as_captured: bool, drafter: ScriptedDrafter | None = None,
        **settings: Any) -> tuple[list[list[list[int]]], StateRig, AsCaptured | None]:
    with StateRig(hybrid(family), drafter=drafter, overlap=False, max_num_seqs=3, **settings) as rig:
        captured = AsCaptured(rig, takes_prompts=False) if as_captured else None
        return tokens_of(rig.run(ASKS)), rig, captured


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("drafts", [0, K])
def test_f4_checkpoints_of_captured_batches(family: str, drafts: int) -> None:
    """The same tokens and, after every step, the same states and checkpoints as token by token."""
    wanted, _, _ = run(family, as_captured=False, enable_prefix_caching=False)
    right = {tuple(ask.prompt): sample for ask, (sample,) in zip(ASKS, wanted, strict=True)}

    def script(prompt: tuple[int, ...], index: int) -> list[int]:
        return [(t + 1) % 256 if (i + 1) % 5 == 0 else t for i, t in enumerate(right[prompt])]

    found, rig, captured = run(family, as_captured=True, drafter=ScriptedDrafter(K, script) if drafts else None)
    assert found == wanted
    assert captured is not None and sum(key.takes_checkpoints for key in captured.met) > 3
    assert rig.num_checkpoints > 5 and rig.scheduler.cache.checkpoints.num_written > 5
