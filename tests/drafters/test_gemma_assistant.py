"""The Gemma 4 assistant: drafts equal to transformers' own, what it refuses, and text that does not depend on it."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import SpeculativeConfig
from outrider.core.params import SamplingParams
from outrider.drafters.base import DraftBuild, Drafts, Step
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.gemma_assistant import AssistantDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.registry import make_drafter
from outrider.models.config import ConfigError
from outrider.models.sources.model_source import WeightError
from tests.covering import grid
from tests.drafters.rig import DraftRig
from tests.drafters.trained import (
    ASSISTANT,
    DRAFTS,
    SPECULATIVE,
    WINDOW,
    accepted_counts,
    trained_asks,
    trained_prompts,
    trained_rig,
    trained_target,
)
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_alone, tokens_of
from tests.engine.test_no_host_reads import PlansMayRead, guard_steps
from tests.models.gemma4 import TARGETS, Candidates, save_assistant, save_target
from tests.models.oracle import load

SHARED = prompt_of(0, 32)
RANDOM_ASKS = [
    Ask([*SHARED, *prompt_of(1, 9)], greedy(8)),
    Ask(prompt_of(2, 1), greedy(18)),
    Ask([*SHARED[:16], *prompt_of(3, 20)], SamplingParams(temperature=1.0, seed=7, max_tokens=9)),
    Ask([*SHARED, *prompt_of(5, 3)], greedy(7, speculative=2)),
    Ask(prompt_of(6, 15), greedy(8)),
]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Pair]:
    root = tmp_path_factory.mktemp("pairs")
    target = functools.cache(lambda name: save_target(name, root / name))
    assistant = functools.cache(
        lambda name, centroids: save_assistant(name, root / f"{name}-{centroids}", centroids=centroids)
    )
    return lambda name, centroids: (target(name), assistant(name, centroids))


def config_of(assistant: Path, k: int, **changes: Any) -> dict[str, Any]:
    return {"method": "gemma4_assistant", "model": str(assistant), "num_speculative_tokens": k, "auto": False} | changes


def assert_as_transformers(rig: DraftRig, pair: Pair, k: int, shift: int = 0) -> None:
    """Proposals of greedy requests. A shift moves the position that transformers drafts from."""
    candidates, expected = Candidates(*pair, k), {}
    forward = candidates.assistant.forward
    candidates.assistant.forward = lambda position_ids, **rest: forward(position_ids=position_ids + shift, **rest)
    sampled = [tuple(ask.prompt) for ask in RANDOM_ASKS if not ask.params.is_greedy]
    compared = 0
    for proposal in rig.proposals:
        if any(proposal.known[: len(prompt)] == prompt for prompt in sampled):
            continue
        if proposal.known not in expected:
            expected[proposal.known] = candidates.after(proposal.known)
        assert list(proposal.drafts) == expected[proposal.known][: len(proposal.drafts)], len(proposal.known)
        compared += 1
    assert compared > 30 and len({token for drafts in expected.values() for token in drafts}) > 30


# As transformers


@pytest.mark.parametrize("centroids", [False, True], ids=["plain", "centroids"])
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_equal_transformers(pair_of: Callable[[str, bool], Pair], name: str, centroids: bool) -> None:
    """In ragged, padded batches: chunks beside rows that decode, a sampled mate, partly filled padding, results late;
    then again with hits, and with everyone preempted once. The text is that of each request alone, without drafts."""
    pair = pair_of(name, centroids)
    model = load(pair[0], torch.float64)
    with Rig(model, max_num_seqs=1, enable_prefix_caching=False, overlap=False) as plain:
        expected = tokens_of(plain.run_one_by_one(RANDOM_ASKS))
    with DraftRig(model, speculative_config=config_of(pair[1], 4), max_num_seqs=3, overlap=True,
                  num_pages=60, max_num_batched_tokens=23, max_model_len=64, pad_requests=(3, 8),
                  pad_tokens=(6, 30)) as rig:
        assert tokens_of(rig.run(RANDOM_ASKS)) == expected
        late = rig.run(RANDOM_ASKS, after_step=rig.preempt)
        assert tokens_of(late) == expected
        stats = rig.scheduler.stats
        assert stats.max_steps_in_flight == 2 and stats.num_preemptions > 0 and rig.runner.num_padded_steps > 0
        assert any(output.metrics.num_cached_tokens >= 32 for output in late)
        assert any(not all(batch.samples) and any(batch.num_drafts) for batch in rig.batches), "chunks beside drafts"
        assert_as_transformers(rig, pair, 4)


def test_unified_pairs_in_float32(tmp_path: Path) -> None:
    """With the backend that float32 gets on this machine."""
    pair = save_target("dense", tmp_path / "target", unified=True), tmp_path / "assistant"
    save_assistant("dense", pair[1], unified=True)
    with DraftRig(load(pair[0]), speculative_config=config_of(pair[1], 3), num_pages=100, pad_requests=(8,)) as rig:
        rig.run(RANDOM_ASKS)
        assert_as_transformers(rig, pair, 3)


def test_the_other_position_is_one_back(pair_of: Callable[[str, bool], Pair]) -> None:
    pair = pair_of("dense", False)
    config = config_of(pair[1], 3, assistant_position="computed")
    with DraftRig(load(pair[0], torch.float64), speculative_config=config, num_pages=100) as rig:
        rig.run(RANDOM_ASKS)
        assert_as_transformers(rig, pair, 3, shift=-1)
        with pytest.raises(AssertionError):
            assert_as_transformers(rig, pair, 3)


def test_captured_prompts_leave_the_states_that_the_assistant_reads() -> None:
    """Their last layer computes only the token rows that make logits."""
    asks, proposed = trained_asks(1, (20, 37, 5), 8), []
    for is_captured in (False, True):
        with trained_rig(max_num_batched_tokens=24, overlap=False) as rig:
            if is_captured:
                captured = AsCaptured(rig)
            rig.run(asks)
            proposed.append(sorted((p.request_id, p.known, p.drafts) for p in rig.proposals))
    assert any(key.has_prompts and key.num_wanted for key in captured.met)
    assert proposed[0] == proposed[1]


def test_drafts_stop_where_room_ends() -> None:
    with trained_rig(max_model_len=48) as rig:
        rig.run(trained_asks(1, (20, 33, 34, 35, 36), max_tokens=None))
        assert {len(proposal.drafts) for proposal in rig.proposals} == set(range(1, DRAFTS + 1))


def test_suppressed_tokens_are_not_guessed(tmp_path: Path) -> None:
    folder = shutil.copytree(ASSISTANT.parent / "gemma4", tmp_path / "target")
    ask = trained_asks(1, (20,), 12)[0]
    with trained_rig() as rig:
        rig.run([ask])
        said = sorted({token for proposal in rig.proposals for token in proposal.drafts})[:5]
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": said}))
    with DraftRig(load(folder, torch.float64), speculative_config=SPECULATIVE, num_pages=100) as rig:
        rig.run([ask])
        assert rig.proposals and not {t for p in rig.proposals for t in p.drafts} & set(said)


@pytest.mark.parametrize("centroids", [False, True], ids=["plain", "centroids"])
def test_a_step_reads_nothing(monkeypatch: pytest.MonkeyPatch, pair_of: Callable[[str, bool], Pair],
                              centroids: bool) -> None:
    """Target and assistant have nothing that waits for the device, so that their steps can be captured."""
    monkeypatch.setattr("outrider.mixers.paged.torch_backend.TorchBackend", PlansMayRead)
    target, assistant = pair_of("moe", centroids)
    settings = {"speculative_config": config_of(assistant, 3), "overlap": False, "num_pages": 100}
    with Rig(load(target, torch.float64), **settings) as rig:
        guard = guard_steps(rig, torch.inference_mode)
        rig.run(RANDOM_ASKS)
        assert guard.num_operations > 100 * len(rig.batches), "the steps did pass through the guard"


# What does not fit is refused


@pytest.mark.parametrize("method", ["mtp", "gemma4_assistant"])
def test_both_names_make_the_assistant(method: str) -> None:
    config = SpeculativeConfig.parse(SPECULATIVE | {"method": method})
    drafter = make_drafter(config, DraftBuild(trained_target(), torch.float64, torch.device("cpu"), 128))
    assert isinstance(drafter, AssistantDrafter)
    assert drafter.lookahead == 0 and not any(layer.writes for layer in drafter.attention_layers)
    assert [layer.reads for layer in drafter.cache_layers()] == [2, 3], "the last layer of each kind"
    assert [layer.layer for layer in drafter.cache_layers()] == [4, 5]


@pytest.mark.parametrize("methods", [["ngram", "mtp"], ["gemma4_assistant", "suffix", "ngram"]])
def test_both_names_make_the_assistant_of_a_combination(methods: list[str]) -> None:
    config = SpeculativeConfig.parse(SPECULATIVE | {"method": methods})
    drafter = make_drafter(config, DraftBuild(trained_target(), torch.float64, torch.device("cpu"), 128))
    assert isinstance(drafter, CombinedDrafter)
    assert {type(part) for part in drafter.drafters} == {AssistantDrafter, NgramDrafter}


def changed(path: Path, text: dict[str, Any] | None = None, **changes: Any) -> Path:
    folder = shutil.copytree(ASSISTANT, path)
    config = json.loads((folder / "config.json").read_text()) | changes
    config["text_config"] |= text or {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "backbone_hidden_size": ({}, {"backbone_hidden_size": 64}),
    "num_centroids": ({}, {"use_ordered_embeddings": True, "num_centroids": 7}),
    "vocab_size": ({"vocab_size": 90}, {}),
    "num_kv_shared_layers": ({"num_kv_shared_layers": 1}, {}),
    "enable_moe_block": ({"enable_moe_block": True}, {}),
    "model_type": ({}, {"model_type": "gemma4"}),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_does_not_fit_the_target_is_refused_by_name(tmp_path: Path, key: str) -> None:
    text, changes = REFUSED[key]
    config = config_of(changed(tmp_path / "changed", text, **changes), DRAFTS)
    with pytest.raises(ConfigError, match=key):
        Rig(trained_target(), speculative_config=config)


def test_another_geometry_or_another_family_is_refused(tmp_path: Path) -> None:
    heads = changed(tmp_path / "heads", {"per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}}})
    with pytest.raises(ValueError, match="full_attention layers have 1 KV heads of 32"):
        Rig(trained_target(), speculative_config=config_of(heads, DRAFTS))
    window = changed(tmp_path / "window", {"sliding_window": WINDOW // 2})
    with pytest.raises(ValueError, match=f"a window of {WINDOW // 2}"):
        Rig(trained_target(), speculative_config=config_of(window, DRAFTS))
    with pytest.raises(ValueError, match="the target is a Llama"):
        Rig(tiny_model("llama"), speculative_config=SPECULATIVE)
    with pytest.raises(ValueError, match="assistant_position"):
        SpeculativeConfig.parse(SPECULATIVE | {"assistant_position": "first"})


def test_the_order_of_tokens_must_be_one(pair_of: Callable[[str, bool], Pair], tmp_path: Path) -> None:
    target, assistant = pair_of("dense", True)
    folder = shutil.copytree(assistant, tmp_path / "order")
    tensors = load_file(folder / "model.safetensors")
    order = tensors.pop("masked_embedding.token_ordering")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError, match="hold no tensor masked_embedding.token_ordering"):
        Rig(load(target), speculative_config=config_of(folder, 3))
    save_file(tensors | {"masked_embedding.token_ordering": order.clamp_max(100)}, folder / "model.safetensors")
    with pytest.raises(WeightError, match="each token id from 0 to 255 exactly once"):
        Rig(load(target), speculative_config=config_of(folder, 3))


# The text does not depend on it


class Cell(NamedTuple):
    chunk: int
    prefix: bool
    overlap: bool
    padded: bool
    preempted: bool

    @property
    def settings(self) -> dict[str, Any]:
        padding = {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)} if self.padded else {}
        return {"max_num_batched_tokens": self.chunk, "enable_prefix_caching": self.prefix, "overlap": self.overlap,
                "max_num_seqs": 4, **padding}

    def __str__(self) -> str:
        return "-".join([f"chunk{self.chunk}", *[name for name in self._fields[1:] if getattr(self, name)]])


# Every three of the conditions meet in a quick cell.
CELLS = grid(list(itertools.product((6, 19, 80), *[(False, True)] * 4)), strength=3,
             arguments=lambda *values: (Cell(*values),))


def two_waves() -> tuple[list[Ask], list[Ask]]:
    """Contexts from one token to several windows, in the language (drafts are right) and out of it (they are not). The
    second wave shares what the first has left."""
    prompts = trained_prompts(21, (1, WINDOW - 1, WINDOW, WINDOW + 1, 6 * WINDOW + 2))
    first = [Ask(prompt, greedy(11)) for prompt in prompts]
    second = [
        Ask([*prompts[4][:32], *prompt_of(1, 6, vocab=80)], greedy(9)),
        Ask(prompt_of(2, 12, vocab=80), greedy(9)),
        Ask(prompts[4], SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=10)),
    ]
    return first, second


WAVES = two_waves()


@functools.cache
def plain_tokens() -> list[list[list[int]]]:
    """Each request alone, in one chunk, without drafts and with everything switched off."""
    return tokens_alone(trained_target(), [ask for asks in WAVES for ask in asks])


@pytest.mark.parametrize("cell", CELLS)
def test_tokens_are_a_function_of_the_request(cell: Cell) -> None:
    drafts_lost: list[int] = []
    with trained_rig(**cell.settings) as rig:
        spoil(rig)
        after_step = (lambda: preempt(rig, drafts_lost)) if cell.preempted else None
        outputs = [output for asks in WAVES for output in rig.run(asks, after_step=after_step)]
        stats, hits = rig.scheduler.stats, rig.scheduler.cache.stats.hit_tokens
        assert max(batch.num_tokens for batch in rig.batches) <= cell.chunk
        assert any(not all(batch.samples) for batch in rig.batches) or cell.chunk > 50, "prompts cut into chunks"
        assert (hits > 0) == cell.prefix, "prefix hits"
        assert stats.max_steps_in_flight == (2 if cell.overlap else 1), "steps in flight"
        assert (rig.runner.num_padded_steps > 0) == cell.padded, "padded beyond scheduled"
        assert (stats.num_preemptions > 0) == cell.preempted, "preemptions"
        assert (sum(drafts_lost) > 0) == (cell.preempted and cell.overlap), "drafts in flight when preempted"
        assert accepted_counts(rig) == set(range(DRAFTS + 1)), "every accepted count"
        assert tokens_of(outputs) == plain_tokens()


def spoil(rig: DraftRig) -> None:
    """One draft is wrong at most lengths, another one each time, so that every count of accepted ones comes about."""
    propose = rig._propose

    def spoiled(step: Step) -> Drafts:
        drafts = propose(step)
        wrong = step.known[step.batch.padded.rows] % 5
        index = torch.arange(drafts.tokens.shape[1])
        return replace(drafts, tokens=torch.where(index == wrong[:, None], (drafts.tokens + 1) % 80, drafts.tokens))

    rig._propose = spoiled


def preempt(rig: Rig, drafts_lost: list[int]) -> None:
    """Everyone, once, when three tokens are out; notes the drafts of theirs that are being checked at that time."""
    for request in list(rig.scheduler._running):
        if len(request.token_ids) >= request.prompt_len + 3 and request.stats.num_preemptions == 0:
            for batch in rig.scheduler._in_flight.values():
                if request.id in batch.request_ids:
                    drafts_lost.append(batch.num_drafts[batch.request_ids.index(request.id)])
            rig.scheduler._preempt(request)


def test_hits_at_every_boundary() -> None:
    """Prompts that leave an earlier one just before, at and just after each page boundary, over several windows."""
    (whole,) = trained_prompts(31, (70,))
    with trained_rig() as rig, Rig(trained_target(), max_model_len=128, enable_prefix_caching=False) as plain:
        rig.run([Ask(whole, greedy(4))])
        boundaries = range(16, 80, 16)
        for boundary, around in itertools.product(boundaries, (-1, 0, 1)):
            count = min(boundary + around, len(whole))
            asks = [Ask([*whole[:count], *prompt_of(count, 3, vocab=80)], greedy(9)), Ask(whole[:count], greedy(6))]
            outputs = rig.run(asks)
            hits = [output.metrics.num_cached_tokens for output in outputs]
            assert hits == [count // 16 * 16, (count - 1) // 16 * 16], "one token is always computed"
            assert tokens_of(outputs) == tokens_of(plain.run(asks))
