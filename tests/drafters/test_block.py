"""Block drafters: drafts in ragged, padded, paged batches equal those of a naive reference, and the text of whole
engines is that of engines without drafts. In float64; every case asserts that its condition occurred."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.config import SpeculativeConfig
from outrider.core import NULL_PAGE
from outrider.core.params import SamplingParams
from outrider.drafters.base import DraftBuild, HiddenReads
from outrider.drafters.block import BlockDrafter
from outrider.drafters.files import method_of
from outrider.drafters.registry import make_drafter as build_drafter
from outrider.models.base import Model
from outrider.models.sources import resolve
from tests.covering import grid
from tests.drafters.blocks import FORMS, BlockReference, make_block
from tests.drafters.checkpoints import Drafter
from tests.drafters.hybrid_rig import hybrid_of
from tests.drafters.rig import DraftRig, Proposal
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of
from tests.engine.test_no_host_reads import MODES, guard_steps, quiet_rig

SHARED = prompt_of(0, 32)
ASKS = [
    Ask([*SHARED, *prompt_of(1, 9)], greedy(10)),
    Ask([*SHARED, *prompt_of(2, 3)], SamplingParams(temperature=1.0, seed=7, max_tokens=8)),
    Ask([*SHARED[:16], *prompt_of(3, 25)], greedy(7, speculative=2)),
    Ask(prompt_of(4, 1), greedy(13)),
    Ask([*SHARED, *prompt_of(5, 6)], greedy(6, speculative=False)),
    Ask(prompt_of(6, 18), greedy(9, speculative=4)),
]
MakeDrafter = Callable[[str, str], Drafter]
CELLS = grid([(form, family) for form in FORMS for family in ("llama", "gemma3")], strength=0,
             also=[("dflash_sliding", "gemma3"), ("dflash_wide_windows", "llama"), ("dspark_speculators", "llama")])


def target_of(family: str) -> Model:
    return hybrid_of(family) if family in ("nemotron_h", "qwen3_next") else tiny_model(family)


@pytest.fixture(scope="module")
def drafter_of(tmp_path_factory: pytest.TempPathFactory) -> MakeDrafter:
    root: Path = tmp_path_factory.mktemp("blocks")
    head_dim = {"llama": 8, "gemma3": 16}
    return cache(lambda form, family: make_block(form, target_of(family), root / f"{form}-{family}",
                                                 head_dim.get(family, 8)))


def assert_as_reference(proposals: list[Proposal], asks: list[Ask], drafter: Drafter, target: Model, k: int,
                        max_len: int, valid_from: Callable[[Proposal], int] = lambda proposal: 0) -> None:
    reference = BlockReference(drafter, target)
    params = {tuple(ask.prompt): ask.params for ask in asks}
    expected: dict[tuple[Any, ...], list[int]] = {}
    for proposal in proposals:
        own = next(p for prompt, p in params.items() if proposal.known[: len(prompt)] == prompt)
        rows = min(k + reference.first_row, max_len - len(proposal.known) + 1)
        key = (proposal.known, len(proposal.drafts), valid_from(proposal))
        if key not in expected:
            expected[key] = reference.drafts(proposal.known, key[1], own, key[2], rows)
        assert list(proposal.drafts) == expected[key], f"after {len(proposal.known)} tokens, valid from {key[2]}"


@pytest.mark.parametrize(("form", "family"), CELLS)
def test_ragged_padded_batches_with_hits_and_preemptions(form: str, family: str, drafter_of: MakeDrafter) -> None:
    """Prompts cut into chunks beside rows that decode, fewer drafts or none, padding that is partly filled, results
    two steps late, everyone preempted once with steps in flight."""
    drafter, target = drafter_of(form, family), target_of(family)
    with DraftRig(target, speculative_config=drafter.speculative(5), max_num_seqs=4, overlap=True, num_pages=128,
                  max_num_batched_tokens=23, max_model_len=64, pad_requests=(3, 8), pad_tokens=(6, 30)) as rig:
        rig.run(ASKS)
        late = rig.run(ASKS, after_step=rig.preempt)  # the second time with hits for everyone
        stats = rig.scheduler.stats
        assert stats.max_steps_in_flight == 2 and rig.runner.num_padded_steps > 0
        assert stats.num_preemptions == len(ASKS) and stats.num_dropped_results > 0
        assert any(output.metrics.num_cached_tokens >= 32 for output in late)
        assert any(not all(batch.samples) and any(batch.num_drafts) for batch in rig.batches), "chunks beside drafts"
        assert {len(p.drafts) for p in rig.proposals} == {5}
        assert rig.step.drafter is not None
        for layer in rig.step.drafter.attention_layers:
            assert not rig.step.pool.layer(layer.index)["k"][NULL_PAGE].any(), "rows of padding wrote keys"
        assert_as_reference(rig.proposals, ASKS, drafter, target, 5, 64)


@pytest.mark.parametrize("form", grid([(form,) for form in FORMS], 0, also=[("dflash_wide_windows",), ("dspark",)]))
def test_each_number_of_drafts_up_to_the_longest_length(form: str, drafter_of: MakeDrafter) -> None:
    """Until max_model_len, where room for drafts runs out and the last rows of a block are dead."""
    drafter = drafter_of(form, "llama")
    asks = [Ask(prompt_of(8, 36), greedy(None)), Ask(prompt_of(9, 41), greedy(None))]
    for k in (1, 4):
        with DraftRig(tiny_model("llama"), speculative_config=drafter.speculative(k), max_model_len=48) as rig:
            rig.run(asks)
            assert {len(p.drafts) for p in rig.proposals} == set(range(1, k + 1)), "room for all, then for fewer"
            assert_as_reference(rig.proposals, asks, drafter, tiny_model("llama"), k, 48)


@pytest.mark.parametrize(("form", "family"), grid([(form, family) for form in FORMS for family in ("llama", "gemma3")],
                                                  0, also=[("dflash_sliding", "gemma3"), ("dspark", "llama")]))
def test_equal_drafts_after_a_hit_and_after_a_preemption(form: str, family: str, drafter_of: MakeDrafter) -> None:
    """The hit is longer than the windows, whose first pages are gone by then."""
    drafter, ask = drafter_of(form, family), Ask([*SHARED, *prompt_of(1, 41)], greedy(9))
    runs: list[dict[tuple[int, ...], tuple[int, ...]]] = []
    with DraftRig(tiny_model(family), speculative_config=drafter.speculative(4), max_num_batched_tokens=19) as rig:
        for after_step in (None, None, rig.preempt):
            rig.proposals.clear()
            (output,) = rig.run([ask], after_step=after_step)
            runs.append({p.known: p.drafts for p in rig.proposals})
            assert output.metrics.num_cached_tokens == (64 if len(runs) > 1 else 0)
        assert output.metrics.num_preemptions == 1
    assert runs[0] and runs[0] == runs[1]
    assert runs[0].items() <= runs[2].items(), "a resumed request may propose at other lengths, but nothing else"


@pytest.mark.parametrize("form", ["dflash_sliding", "dspark"])
def test_cold_steps_leave_only_what_is_filled_since(form: str, drafter_of: MakeDrafter) -> None:
    """Steps 2 to 4 propose nothing, so their tokens leave no context."""
    drafter, ask = drafter_of(form, "llama"), Ask(prompt_of(10, 21), greedy(16))
    with DraftRig(tiny_model("llama"), speculative_config=drafter.speculative(3), enable_prefix_caching=False,
                  propose_at=lambda step: 0 if 2 <= step <= 4 else 3) as rig:
        rig.run([ask])
        assert rig.num_cold == 3
        lengths = [len(p.known) for p in rig.proposals]
        resumed = next(i for i, n in enumerate(lengths) if i > 0 and n - lengths[i - 1] > 3)
        begin = lengths[resumed] - 2  # the first token that step 5 computed
        assert_as_reference(rig.proposals, [ask], drafter, tiny_model("llama"), 3, 96,
                            lambda p: begin if len(p.known) >= lengths[resumed] else 0)


@pytest.mark.parametrize("form", ["dflash_speculators", "dspark"])
def test_a_hit_on_pages_partly_cold_uses_the_warm_tail(form: str, drafter_of: MakeDrafter) -> None:
    """Chunks of 16, the prompt's first two cold: the pages of tokens 0 to 31 have no context, those behind do."""
    drafter, ask = drafter_of(form, "llama"), Ask(prompt_of(11, 70), greedy(6))
    with DraftRig(tiny_model("llama"), speculative_config=drafter.speculative(3), max_num_batched_tokens=16,
                  propose_at=lambda step: 0 if step < 2 else 3) as rig:
        rig.run([ask])
        first = list(rig.proposals)
        rig.proposals.clear()
        (output,) = rig.run([ask])
        assert output.metrics.num_cached_tokens == 64 and rig.num_cold == 2
        for proposals in (first, rig.proposals):
            assert_as_reference(proposals, [ask], drafter, tiny_model("llama"), 3, 96, lambda p: 32)


def test_pages_of_another_request_that_cold_steps_fill_anew_have_no_context(drafter_of: MakeDrafter) -> None:
    """A pool that holds one request: the second one's pages were full of the first one's context."""
    drafter, first, second = drafter_of("dspark", "llama"), Ask(prompt_of(11, 70), greedy(4)), Ask(prompt_of(12, 70),
                                                                                                greedy(4))
    with DraftRig(tiny_model("llama"), speculative_config=drafter.speculative(3), num_pages=7,
                  propose_at=lambda step: 3 if rig.is_warm else 0) as rig:
        for ask, rig.is_warm in ((first, True), (second, False), (second, True)):  # type: ignore[attr-defined]
            rig.proposals.clear()
            (output,) = rig.run([ask])
        assert output.metrics.num_cached_tokens == 64 and rig.proposals
        assert_as_reference(rig.proposals, [second], drafter, tiny_model("llama"), 3, 96, lambda p: 64)


# Whole engines

PARAMS = {"greedy": {"temperature": 0}, "sampled": {"temperature": 1.0, "seed": 11}}
CONDITIONS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 9},
    "no overlap": {"overlap": False},
    "overlap": {"overlap": True},
    "padded": {"pad_requests": (4, 8), "pad_tokens": (16, 32, 64)},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"overlap": True},
}
FAMILIES = ("llama", "gemma3", "nemotron_h", "qwen3_next")
MATRIX = [(form, family, kind, condition) for form in FORMS for family in FAMILIES for kind in PARAMS
          for condition in CONDITIONS]


def asks_of(family: str, kind: str) -> list[Ask]:
    vocab = target_of(family).vocab_size
    prompts = [prompt_of(seed, count, vocab) for seed, count in ((1, 21), (2, 15), (3, 32), (4, 70))]
    return [Ask(prompt, SamplingParams(max_tokens=14, ignore_eos=True, **PARAMS[kind])) for prompt in prompts]


@cache
def expected(family: str, kind: str) -> list[list[list[int]]]:
    with Rig(target_of(family), num_pages=160) as rig:
        return tokens_of(rig.run(asks_of(family, kind)))


@pytest.mark.parametrize(("form", "family", "kind", "condition"), grid(MATRIX, 1))
def test_text_is_that_without_drafts(form: str, family: str, kind: str, condition: str,
                                     drafter_of: MakeDrafter) -> None:
    drafter, asks = drafter_of(form, family), asks_of(family, kind)
    with Rig(target_of(family), speculative_config=drafter.speculative(3), num_pages=200,
             **CONDITIONS[condition]) as rig:
        first = rig.run(asks, after_step=rig.preempt if condition == "preempted" else None)
        again = rig.run(asks)
        assert tokens_of(first) == tokens_of(again) == expected(family, kind)
        metrics = [output.metrics for output in first + again]
        assert sum(m.num_draft_tokens for m in metrics) > 0
        assert (rig.scheduler.stats.num_preemptions > 0) == (condition == "preempted")
        assert (rig.runner.num_padded_steps > 0) == (condition == "padded")
        assert (sum(output.metrics.num_cached_tokens for output in again) > 0) == (condition != "no prefix cache")


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
def test_recurrent_targets_give_their_streams(family: str, tmp_path: Path) -> None:
    target = target_of(family)
    drafter = make_block("dflash", target, tmp_path)
    asks = asks_of(family, "greedy")
    with DraftRig(target, speculative_config=drafter.speculative(3), num_pages=200, overlap=True) as rig:
        rig.run(asks)
        rig.run(asks, after_step=rig.preempt)
        assert rig.scheduler.stats.num_preemptions > 0 and rig.proposals
        assert_as_reference(rig.proposals, asks, drafter, target, 3, 96)


def test_confidence_leaves_out_drafts_that_are_hardly_reached(tmp_path: Path) -> None:
    target, ask = tiny_model("llama"), Ask(prompt_of(3, 20), greedy(20))
    drafter = make_block("dspark", target, tmp_path)
    config = drafter.speculative(5) | {"min_draft_confidence": 0.2}
    reference, counts = BlockReference(drafter, target), set()
    with DraftRig(target, speculative_config=config) as rig:
        (output,) = rig.run([ask])
        for proposal in rig.proposals:
            rows = min(5, 96 - len(proposal.known) + 1)
            drafts, confidences = reference.drafts_with_confidence(proposal.known, 5, ask.params, 0, rows)
            reached, count = 1.0, 0
            for confidence in confidences:
                reached *= confidence
                count += reached >= 0.2
            assert list(proposal.drafts) == drafts[:count]
            counts.add(count)
        assert len(counts) > 1, "the confidence of this drafter does not vary"
    with Rig(target) as rig:
        assert tokens_of(rig.run([ask])) == tokens_of([output])


def test_a_least_confidence_needs_a_confidence_head(tmp_path: Path) -> None:
    drafter = make_block("dflash", tiny_model("llama"), tmp_path)
    config = SpeculativeConfig.parse(drafter.speculative(3) | {"min_draft_confidence": 0.2})
    with pytest.raises(ValueError, match=r"min_draft_confidence is 0.2, and the drafter .* has no confidence head"):
        build_drafter(config, DraftBuild(tiny_model("llama"), torch.float64, torch.device("cpu"), max_len=64))


@pytest.mark.parametrize("form", ["dflash_sliding", "dspark"])
def test_a_step_with_blocks_reads_nothing_on_the_host(form: str, drafter_of: MakeDrafter,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected("llama", "sampled")
    with quiet_rig(monkeypatch, "llama", speculative_config=drafter_of(form, "llama").speculative(3)) as rig:
        guard = guard_steps(rig, MODES["no_grad"])
        assert tokens_of(rig.run(asks_of("llama", "sampled"))) == wanted
        assert guard.num_operations > 100 * len(rig.batches)


@pytest.mark.parametrize(("form", "options"), [
    ("dflash_sliding", {"attention_backend": "native"}), ("dflash_wide_windows", {"attention_backend": "native"}),
    pytest.param("dflash_sliding", {"attention_backend": "flex", "num_pages": 32}, marks=pytest.mark.long),
])
def test_other_backends_draft_the_same(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    """In float32 drafts may differ by near-ties, which random weights have few of."""
    target = tiny_model("llama", torch.float32)
    drafter = make_block(form, target, tmp_path)
    asks, runs = [Ask(prompt_of(3, 32), greedy(14)), Ask(prompt_of(5, 9), greedy(14))], []
    for settings in ({"attention_backend": "torch"}, options):
        with DraftRig(target, speculative_config=drafter.speculative(3), **settings) as rig:
            rig.run(asks)
            runs.append({(p.known, p.drafts) for p in rig.proposals})
    assert len(runs[0] & runs[1]) > 0.9 * len(runs[0])


# Files


def load(drafter: Drafter, k: int = 3, **changes: Any) -> BlockDrafter:
    config = {key: value for key, value in (drafter.config | changes).items() if value is not ...}
    (drafter.folder / "config.json").write_text(json.dumps(config))
    speculative = SpeculativeConfig.parse(drafter.speculative(k))
    made = build_drafter(speculative, DraftBuild(tiny_model("llama"), torch.float64, torch.device("cpu"), max_len=64))
    assert isinstance(made, BlockDrafter)
    return made


@pytest.mark.parametrize("form", FORMS)
def test_the_files_tell_that_they_draft_blocks(form: str, tmp_path: Path) -> None:
    drafter = make_block(form, tiny_model("llama"), tmp_path)
    assert method_of(resolve(drafter.folder), has_tensors=True, is_target=False) == "block"
    for name in ("dflash", "dspark"):  # vLLM's names
        assert SpeculativeConfig.parse(drafter.speculative(2) | {"method": name}).method == "block"
        listed = SpeculativeConfig.parse(drafter.speculative(2) | {"method": ["ngram", name]})
        assert listed.methods == ("ngram", "block")
    made = load(drafter)
    assert made.head.aux_layers == tuple(BlockReference(drafter, tiny_model("llama")).aux_layers)
    assert made.lookahead == 3 + made.head.first_row
    assert (made.reads_hidden is HiddenReads.ALL) == (2 in made.aux_layers), "the last stream has all rows if asked"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"num_target_layers": 7}, "num_target_layers=7 is not supported; the target has 2 layers"),
    ("dflash", {"hidden_size": 48}, "hidden_size=48 is not supported; the target's hidden size is 32"),
    ("dflash", {"architectures": ["DFlash2DraftModel"]}, "DFlash2 has convolutions"),
    ("dflash", {"block_size": ...}, "block_size is missing"),
    ("dflash", {"attention_sink": True}, "attention_sink=True: Outrider does not read this"),
    ("dflash", {"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is missing"),
    ("dflash", {"dflash_config": {"mask_token_id": 256, "target_layer_ids": [0]}}, "mask_token_id=256 .* 0 to 255"),
    ("dspark", {"target_layer_ids": [2]}, r"target_layer_ids=\[2\] is not supported: the target has 2 layers, so ids"),
    ("dspark", {"markov_head_type": "other"}, "markov_head_type='other' is not supported"),
    ("dspark", {"markov_rank": 0}, "markov_rank=0 is not supported; it must be above 0"),
    ("dflash_speculators", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
    ("dflash_speculators", {"draft_vocab_size": 300}, "draft_vocab_size=300 is not supported"),
]


@pytest.mark.parametrize(("form", "changes", "words"), REFUSED)
def test_what_does_not_fit_is_refused_by_its_key(form: str, changes: dict[str, Any], words: str,
                                                 tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load(make_block(form, tiny_model("llama"), tmp_path), **changes)


def test_a_window_smaller_than_the_block_is_refused(tmp_path: Path) -> None:
    drafter = make_block("dflash_wide_windows", tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match="the window has 3 tokens, and a block of 4 rows must fit into it"):
        load(drafter, dflash_config=drafter.config["dflash_config"] | {"swa_window_size": 3})


def test_a_block_of_one_row_makes_one_draft_where_the_last_known_token_predicts_it(tmp_path: Path) -> None:
    drafter = make_block("dspark", tiny_model("llama"), tmp_path / "dspark")
    assert load(drafter, k=1, block_size=1).head.made_for == 1
    with pytest.raises(ValueError, match="block_size must be an integer from 2 "):
        load(make_block("dflash", tiny_model("llama"), tmp_path / "dflash"), k=1, block_size=1)


@pytest.mark.parametrize("form", ["dflash", "dspark", "dspark_speculators"])
def test_files_of_a_block_drafter_are_none_of_an_eagle_head(form: str, tmp_path: Path) -> None:
    drafter = make_block(form, tiny_model("llama"), tmp_path)
    for method in ("eagle", "eagle3"):
        config = SpeculativeConfig.parse(drafter.speculative(2) | {"method": method})
        with pytest.raises(ValueError, match=f"a block drafter and the method is '{method}': use method 'block'"):
            build_drafter(config, DraftBuild(tiny_model("llama"), torch.float64, torch.device("cpu"), max_len=64))


def test_a_reduced_vocabulary_needs_its_tensors(tmp_path: Path) -> None:
    drafter = make_block("dflash_speculators", tiny_model("llama"), tmp_path)
    for missing, words in (("d2t", "has no tensor d2t"), ("lm_head.weight", "has no lm_head.weight")):
        save_file({name: tensor for name, tensor in drafter.tensors.items() if name != missing},
                  drafter.folder / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load(drafter)
