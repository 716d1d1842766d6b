"""Engines whose steps run on several ranks: the same requests, scheduled the same way, on every rank at once.

The small trained models (tests/assets) with their drafters, read from files. float64, so that equal drafts means equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.drafters.mtp import modules_drafter
from outrider.formats import RankGroup
from outrider.models.loader import load_model
from outrider.models.mtp import build_mtp_modules
from outrider.models.sources import resolve
from tests.drafters import hybrid_rig, latent_rig
from tests.drafters.rig import DraftRig
from tests.drafters.trained_heads import drafts_of
from tests.engine.harness import CONFIGS, CPU, Ask, prompt_of, random_model, save_folder, tokens_of
from tests.ranks.pool import RankPool

ASSETS = Path(__file__).parents[1] / "assets"
K = 3
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 96, "num_pages": 128}
# drafter -> (target, size of its vocabulary, method, folder of the drafter)
DRAFTERS: dict[str, tuple[str, int, str, str]] = {
    "eagle3": ("target", 128, "eagle3", "eagle3"),
    "draft model": ("target", 128, "draft_model", "target"),
    "assistant": ("gemma4", 80, "mtp", "gemma4_assistant"),
    "mtp of a hybrid": ("nemotronh", 88, "mtp", "nemotronh"),
    "mtp of latent layers": ("deepseek_v32", 28, "mtp", "deepseek_v32"),
}
QUICK = {("eagle3", 2), ("mtp of a hybrid", 2)}


def asks_of(vocab: int) -> list[Ask]:
    """Greedy and sampled, over several chunks; two with a common prefix."""
    prompts = [prompt_of(1, 40, vocab), prompt_of(2, 19, vocab), prompt_of(3, 7, vocab)]
    prompts.append(prompts[0][:33] + prompt_of(4, 4, vocab))
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=12, ignore_eos=True)
    params = [sampled if number % 2 else SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
              for number in range(len(prompts))]
    return [Ask(prompt, own) for prompt, own in zip(prompts, params, strict=True)]


def run_engine(group: RankGroup | None, drafter: str, other_folder: Path | None = None, has_hits: bool = True) -> Any:
    """Tokens, drafts by what was known, and the drafter's bytes. The requests run twice, so that prefixes are found
    again, and all are preempted once."""
    target, vocab, method, folder = DRAFTERS[drafter]
    model = load_model(resolve(ASSETS / target), dtype=torch.float64, device="cpu", group=group)
    speculative = {"method": method, "model": str(other_folder or ASSETS / folder), "num_speculative_tokens": K,
                   "auto": False}
    with DraftRig(model, speculative_config=speculative, enable_prefix_caching=has_hits, **SETTINGS) as rig:
        tokens = [tokens_of(rig.run(asks_of(vocab), after_step=rig.preempt)) for _ in range(2)]
        assert rig.scheduler.stats.num_preemptions > 0 and (rig.scheduler.cache.stats.hit_tokens > 0) == has_hits
        assert rig.step.drafter is not None and rig.engine.stats.num_draft_tokens > 0
        return tokens, drafts_of(rig), rig.step.drafter.weight_bytes()


@pytest.mark.parametrize(("drafter", "count"), [
    pytest.param(drafter, count, marks=[] if (drafter, count) in QUICK else pytest.mark.long)
    for drafter in DRAFTERS for count in (2, 4)])
def test_texts_and_drafts_are_those_of_one_rank(ranks: RankPool, drafter: str, count: int) -> None:
    """A rank's pages may hold more tokens, so chunks, hits and the known texts at which drafts are made may differ."""
    expected = run_engine(None, drafter)
    for result in ranks.run(count, run_engine, drafter):
        assert_same(result, expected)
        assert result[2] < expected[2]


def assert_same(result: Any, expected: Any) -> None:
    assert result[0] == expected[0]
    drafts, own_drafts = expected[1], result[1]
    common = drafts.keys() & own_drafts.keys()
    assert len(common) > len(drafts) / 2 and all(drafts[known] == own_drafts[known] for known in common)


@pytest.mark.long
@pytest.mark.parametrize("has_hits", [False, True])
def test_a_draft_model_that_ranks_cannot_share_is_whole_on_each(ranks: RankPool, tmp_path: Path,
                                                                has_hits: bool) -> None:
    """A prefix hit that ends inside a page of the drafter leaves it without the tokens of that page, so that it drafts
    from fewer. Its pages hold 32 tokens on one rank, and 16 on two, as those of the target's halves: behind a hit of 16
    tokens drafts differ, and nowhere else. The text is the same everywhere."""
    sizes = {"vocab_size": 128, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3}
    folder = save_folder(tmp_path / "odd", CONFIGS["llama"] | sizes)
    expected = run_engine(None, "draft model", folder, has_hits)
    for result in ranks.run(2, run_engine, "draft model", folder, has_hits):
        assert result[2] == expected[2]
        assert_same(*(map(_without_short_hit, (result, expected)) if has_hits else (result, expected)))


def _without_short_hit(result: Any) -> Any:
    """The result without drafts behind the prompt of which 16 tokens are found again."""
    tokens, drafts, num_bytes = result
    (short,) = (tuple(ask.prompt) for ask in asks_of(128) if 16 < len(ask.prompt) < 32)
    return tokens, {known: own for known, own in drafts.items() if tuple(known[: len(short)]) != short}, num_bytes


# Random models of the other families with their MTP modules, several of them in one, whose sizes two ranks can share.
HYBRIDS = {name: config | ({"linear_num_key_heads": 2} if "linear_num_key_heads" in config else {})
           for name, config in hybrid_rig.FAMILIES.items()}
RANDOM = HYBRIDS | latent_rig.FAMILIES


def run_random(group: RankGroup | None, family: str) -> Any:
    model = random_model(RANDOM[family], torch.float64, 4, group)
    modules = build_mtp_modules(model, first_layer=model.num_layers, dtype=model.dtype, device=CPU)
    for head in modules:
        if group is not None:
            head.shard(group)
        generator = torch.Generator().manual_seed(6)
        for name, slot in head.weights().items():
            center = 1.0 if "norm" in name and not head.description.norm_offset else 0.0
            slot.store(torch.empty(slot.shape, dtype=torch.float64).normal_(center, 0.25, generator=generator))
        head.finalize()
    with DraftRig(model, drafter=modules_drafter(modules, K), **SETTINGS) as rig:
        tokens = [tokens_of(rig.run(asks_of(hybrid_rig.VOCAB), after_step=rig.preempt)) for _ in range(2)]
        assert rig.scheduler.stats.num_preemptions > 0
        return tokens, drafts_of(rig)


@pytest.mark.long
@pytest.mark.parametrize("family", RANDOM)
def test_every_family_with_its_modules(ranks: RankPool, family: str) -> None:
    expected = run_random(None, family)
    for result in ranks.run(2, run_random, family):
        assert_same(result, expected)
