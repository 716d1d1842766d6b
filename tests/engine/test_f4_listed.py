"""F4, batches as captured steps take them: padded to a graph's size, checkpoints as one integer per request, and their
pages listed in the rows. On the CPU nothing is captured; the same integers go through the same step.
"""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core import ScheduledBatch
from outrider.core.params import SamplingParams
from outrider.runner.batch import PaddedSize
from outrider.runner.graphs.keys import GraphKeys
from outrider.runner.local import Padding
from outrider.runner.rows import RowParams
from outrider.spec.scripted import ScriptedDrafter
from tests.engine.harness import Ask, greedy, prompt_of, tokens_of
from tests.engine.recurrent_rig import HYBRIDS, StateRig, hybrid

K = 3
SHARED = prompt_of(0, 32)
ASKS = [
    Ask([*SHARED, *prompt_of(1, 13)], greedy(40)),
    Ask([*SHARED, *prompt_of(2, 9)], SamplingParams(temperature=1.0, seed=7, max_tokens=30)),
    Ask(prompt_of(3, 5), greedy(34)),
]


class AsCaptured(Padding):
    """Sizes of the graphs that would serve; the other batches as they are."""

    def __init__(self, keys: GraphKeys, params: RowParams) -> None:
        super().__init__()
        self._keys, self._params = keys, params
        self.num_checkpoints = 0

    def size_for(self, batch: ScheduledBatch) -> PaddedSize:
        key = self._keys.key_for(batch, self._params)
        if key is None:
            return super().size_for(batch)
        self.num_checkpoints += key.has_targets
        return self._keys.padded_size(key)


def run(family: str, *, as_captured: bool, drafter: ScriptedDrafter | None = None,
        **settings: Any) -> tuple[list[list[list[int]]], StateRig]:
    with StateRig(hybrid(family), drafter=drafter, overlap=False, max_num_seqs=3, **settings) as rig:
        if as_captured:
            keys = GraphKeys(rig.engine.limits, rig.step.drafter, takes_prompts=False)
            rig.runner._padding = AsCaptured(keys, rig.step.state.params)
        return tokens_of(rig.run(ASKS)), rig


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("drafts", [0, K])
def test_f4_checkpoints_of_captured_batches(family: str, drafts: int) -> None:
    """The same tokens and, after every step, the same states and checkpoints as token by token."""
    wanted, _ = run(family, as_captured=False, enable_prefix_caching=False)
    right = {tuple(ask.prompt): sample for ask, (sample,) in zip(ASKS, wanted, strict=True)}

    def script(prompt: tuple[int, ...], index: int) -> list[int]:
        return [(t + 1) % 256 if (i + 1) % 5 == 0 else t for i, t in enumerate(right[prompt])]

    found, rig = run(family, as_captured=True, drafter=ScriptedDrafter(K, script) if drafts else None)
    assert found == wanted
    padding = rig.runner._padding
    assert isinstance(padding, AsCaptured) and padding.num_checkpoints > 3
    assert rig.num_checkpoints > 5 and rig.scheduler.cache.checkpoints.num_written > 5
