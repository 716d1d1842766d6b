"""A draft model with fewer positions than the target drafts up to its own length, and nothing behind it."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import SamplingParams
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import Drafter
from outrider.drafters.draft_model import DraftModelNetwork
from outrider.models.base import Model
from tests.drafters.rig import DraftRig, Proposal
from tests.engine.harness import CONFIGS, Ask, Rig, prompt_of, random_model, save_folder, tiny_model, tokens_of

K, SHORT = 3, 21  # positions: not a whole number of pages
PROMPTS = [prompt_of(1, 9), prompt_of(2, 19), prompt_of(3, 20), prompt_of(4, 34)]
ASKS = [Ask(prompt, SamplingParams(max_tokens=16, ignore_eos=True, temperature=i % 2, seed=i))
        for i, prompt in enumerate(PROMPTS)]


@functools.cache
def draft_of(positions: int) -> Model:
    """The target's own weights: nearly all of its drafts are accepted, so that one that reads garbage shows."""
    return random_model(CONFIGS["llama"] | {"max_position_embeddings": positions}, torch.float64,
                        zlib.crc32(b"llama"))


def drafter_of(positions: int) -> Drafter:
    target = tiny_model("llama")
    network = DraftModelNetwork(draft_of(positions), target.num_layers, target.vocab_size)
    return AutoregressiveDrafter("draft_model", network, K, max_positions=positions)


@functools.cache
def expected() -> list[list[list[int]]]:
    with Rig(tiny_model("llama")) as rig:
        return tokens_of(rig.run(ASKS))


def proposals_of(positions: int, **options: Any) -> list[Proposal]:
    with DraftRig(tiny_model("llama"), drafter=drafter_of(positions), **options) as rig:
        for _ in range(2):  # the second time prefixes hit, of any length
            assert tokens_of(rig.run(ASKS)) == expected()
        assert rig.scheduler.cache.stats.hit_tokens > 0
        return rig.proposals


CHUNKS = {"max_num_batched_tokens": 11, "overlap": False}


@pytest.mark.parametrize("options", [{}, pytest.param(CHUNKS, marks=pytest.mark.long)], ids=["plain", "chunks"])
def test_drafts_up_to_its_length_are_those_of_a_longer_model(options: dict[str, Any]) -> None:
    longer = {(p.known, p.request_id % len(ASKS)): p.drafts for p in proposals_of(256, **options)}
    found, num_same = proposals_of(SHORT, **options), 0
    assert max(len(p.known) for p in found) > SHORT > min(len(p.known) for p in found)
    for proposal in found:
        room = max(0, SHORT - len(proposal.known))
        assert len(proposal.drafts) == min(K, room), "as many as its positions leave room for"
        key = (proposal.known, proposal.request_id % len(ASKS))
        if key in longer and room:
            assert proposal.drafts == longer[key][:room]
            num_same += 1
    assert num_same > 5


def test_a_short_draft_model_is_loaded_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_folder(tmp_path / "draft", CONFIGS["llama"] | {"max_position_embeddings": SHORT})
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": K, "auto": False}
    with Rig(tiny_model("llama"), speculative_config=config) as rig:
        assert f"has {SHORT} positions and max_model_len is 96: longer texts get no drafts from it" in caplog.text
        assert tokens_of(rig.run(ASKS[:1])) == expected()[:1]
        assert rig.engine.stats.num_draft_tokens > 0
