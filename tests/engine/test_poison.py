"""A page never shows another owner's bytes: free pages hold NaN in all engine tests, and here every way to meet one."""

from __future__ import annotations

import pytest
import torch

from outrider.core import NULL_PAGE
from outrider.core.params import SamplingParams
from tests.engine.harness import CONFIGS, Ask, Rig, prompt_of, tiny_model, tokens_of

# Lengths around page boundaries, so that pages are owned with nothing, little and all but one slot in use.
ASKS = [
    Ask(prompt_of(length, length), SamplingParams(seed=length, max_tokens=7))
    for length in (1, 3, 15, 16, 17, 31, 33, 40)
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("family", CONFIGS)
def test_poisoned_pages_never_reach_an_output(family: str, dtype: torch.dtype) -> None:
    settings = {"num_pages": 13, "max_model_len": 64, "enable_prefix_caching": False, "max_num_batched_tokens": 20}
    model = tiny_model(family, dtype)
    with Rig(model, **settings) as poisoned, Rig(model, poison=False, **settings) as clean:
        assert tokens_of(poisoned.run(ASKS)) == tokens_of(clean.run(ASKS))
        assert poisoned.num_poisoned > 0
        assert_recycled(poisoned)


def assert_recycled(rig: Rig) -> None:
    """Pages went from owner to owner, and their unused slots still held NaN at the end."""
    writes = [write for batch in rig.batches for write in batch.page_writes]
    granted = [page for write in writes for page in write.pages if page != NULL_PAGE]
    assert max(granted.count(page) for page in set(granted)) > 1
    assert rig.step.pool.data.isnan().any()


@pytest.mark.parametrize("family", CONFIGS)
def test_nobody_writes_the_null_page(family: str) -> None:
    """Padded rows and dropped columns point there, and kernels may read it: it must stay finite."""
    with Rig(tiny_model(family), pad_requests=(8,), pad_tokens=(80,)) as rig:
        rig.run(ASKS)
        assert rig.runner.num_padded_steps == len(rig.batches)
        assert (rig.step.pool.data[NULL_PAGE] == 0).all()


def test_a_page_that_changes_group_is_cleared() -> None:
    """The second line: where masks fail, another group's bytes would be read as something else."""
    settings = {"num_pages": 7, "max_model_len": 64, "enable_prefix_caching": False}
    short, long = (Ask(prompt_of(length, length), SamplingParams(seed=1, max_tokens=7)) for length in (3, 50))
    with Rig(tiny_model("gemma3"), **settings) as rig:
        rig.run([short] * 3)  # a page for each of them, in each of the two groups
        assert not [page for batch in rig.batches for page in batch.clear_pages]
        rig.run([long])  # needs four of the group without a window
        cleared = [page for batch in rig.batches for page in batch.clear_pages]
        assert cleared and NULL_PAGE not in cleared
