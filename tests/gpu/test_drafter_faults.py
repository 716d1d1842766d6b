"""Drafters that misbehave, on the card: in captured steps and while steps are captured. The text does not change."""

from __future__ import annotations

import pytest

from outrider.core.drafter_faults import MAX_DRAFTER_FAULTS, FaultKind
from tests.gpu.conftest import HAS_CARD
from tests.gpu.rig import GpuRig, asks, assert_same_tokens, loaded, reference
from tests.gpu.test_engines import folder_of, spec

FAULTS = {
    "NegativeCounts": (FaultKind.COUNT, MAX_DRAFTER_FAULTS), "ForeignTokens": (FaultKind.TOKEN, MAX_DRAFTER_FAULTS),
    "ReadsTheDevice": (FaultKind.RAISED, 1), "WritesRows": (FaultKind.WROTE, 1),
}


@pytest.mark.together("llama")
@pytest.mark.parametrize("name", FAULTS)
def test_a_drafter_that_misbehaves_changes_no_token(name: str) -> None:
    folder, (kind, num) = folder_of("llama"), FAULTS[name]
    if name == "ReadsTheDevice" and not HAS_CARD:
        pytest.skip("only a captured step may not read the device")
    with GpuRig(loaded(folder), speculative_config=spec(f"tests.engine.faulty_drafter:{name}")) as rig:
        for _ in range(2):
            assert_same_tokens(rig.run(asks()), reference(folder), asks())
        stats = rig.engine.stats
        assert {found for _, found in stats.drafter_faults} == {kind} and stats.num_drafter_faults == num
        assert len(stats.drafters_off) == 1 and name in next(iter(stats.drafters_off))[0]
        if HAS_CARD:
            assert rig.runner.num_replays > 0
