"""Embeddings in place of token ids: tokens, drafts and hidden states are those of the ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, PoolingParams, SamplingParams
from outrider.config import EngineConfig
from outrider.engine.start import start_engine
from outrider.features.embeddings.reader import place_embeds
from outrider.models.base import Model
from tests.drafters.checkpoints import make_drafter
from tests.drafters.rig import DraftRig
from tests.drafters.test_latent_drafts import make_checkpoint, without_modules
from tests.engine.harness import (
    CONFIGS,
    Ask,
    Rig,
    byte_tokenizer,
    greedy,
    prompt_of,
    random_model,
    save_folder,
    tiny_model,
    tokens_of,
)
from tests.models.oracle import load

HIDDEN = CONFIGS["llama"]["hidden_size"]
SHARED = prompt_of(0, 32)
ASKS = [
    Ask([*SHARED, *prompt_of(1, 9)], greedy(10)),
    Ask([*SHARED, *prompt_of(2, 3)], SamplingParams(temperature=1.0, seed=7, max_tokens=8, n=2)),
    Ask(prompt_of(4, 1), greedy(13)),
    Ask([*SHARED[:16], *prompt_of(3, 25)], greedy(7)),
]


def embeds_of(model: Model, token_ids: list[int]) -> torch.Tensor:
    return model.embed_tokens.look_up(torch.tensor(token_ids))  # type: ignore[attr-defined, no-any-return]


def with_embeds(asks: list[Ask], model: Model, *, keeps_ids: bool = False) -> list[Ask]:
    """Every other request with embeddings, the others with ids alone."""
    return [ask if index % 2 else replace(ask, prompt=ask.prompt if keeps_ids else [],
                                          embeds=embeds_of(model, ask.prompt))
            for index, ask in enumerate(asks)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_are_those_of_the_ids(family: str) -> None:
    """In chunks beside requests with ids, twice, preempted, with results two steps late. Gemma scales its embedding."""
    model = tiny_model(family)
    with Rig(model) as rig:
        expected = tokens_of(rig.run(ASKS))
    with Rig(model, max_num_batched_tokens=19, depth=2) as rig:
        asks = with_embeds(ASKS, model)
        assert tokens_of(rig.run(asks)) == expected
        again = rig.run(asks, after_step=rig.preempt)
        assert tokens_of(again) == expected
        assert rig.scheduler.stats.num_preemptions > 0
        assert again[0].metrics.num_cached_tokens >= 32, "equal embeddings share pages"
        assert not rig.step.state.params.inputs._by_row, "nothing is kept of prompts that are computed"


def with_some_embeds(asks: list[Ask], model: Model) -> list[Ask]:
    """Every request with embeddings at some positions, among them both ends, and with a wrong id at each of these."""
    found = []
    for ask in asks:
        at = sorted({0, len(ask.prompt) - 1, *range(5, len(ask.prompt), 7), *range(17, min(24, len(ask.prompt)))})
        ids = [255 if index in at else token for index, token in enumerate(ask.prompt)]
        found.append(replace(ask, prompt=ids, embeds=embeds_of(model, [ask.prompt[index] for index in at]),
                             embeds_at=at))
    return found


def test_embeddings_at_some_positions_stand_among_ids() -> None:
    model = tiny_model("llama")
    with Rig(model) as rig:
        expected = tokens_of(rig.run(ASKS))
    with Rig(model, max_num_batched_tokens=19, depth=2) as rig:
        asks = with_some_embeds(ASKS, model)
        assert tokens_of(rig.run(asks)) == expected
        again = rig.run(asks, after_step=rig.preempt)
        assert tokens_of(again) == expected and again[0].metrics.num_cached_tokens >= 32
        assert not rig.step.state.params.inputs._by_row, "nothing is kept of embeddings that are computed"
        moved = replace(asks[2], prompt=[1, *asks[2].prompt], embeds_at=[1])
        assert rig.run([moved])[0].outputs[0].token_ids != expected[2][0]


def run_drafting(model: Model, asks: list[Ask], speculative: dict[str, Any]) -> tuple[list[Any], set[Any]]:
    """Tokens and proposals: of fresh prompts, then after hits and preemptions."""
    with DraftRig(model, speculative_config=speculative, max_num_batched_tokens=19) as rig:
        outputs = [tokens_of(rig.run(asks, after_step=after)) for after in (None, rig.preempt)]
        assert rig.engine.stats.num_draft_tokens > 0 and rig.scheduler.cache.stats.hit_tokens > 0
        return outputs, {(proposal.request_id, len(proposal.known), proposal.drafts) for proposal in rig.proposals}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "mtp" else pytest.mark.long)
                                  for kind in ("eagle", "eagle3", "mtp", "draft_model")])
def test_drafts_are_those_of_the_ids(kind: str, tmp_path: Path) -> None:
    """For a draft model, which has a table of its own, the ids stand beside the embeddings. This EAGLE head has one
    too, and is given the target's embeddings all the same: its drafts may differ."""
    model, speculative = tiny_model("llama"), make_drafter(kind, "llama", tmp_path).speculative(3)
    tokens, drafts = run_drafting(model, ASKS[:3], speculative)
    found, own_drafts = run_drafting(model, with_embeds(ASKS[:3], model, keeps_ids=kind == "draft_model"), speculative)
    assert found == tokens and (kind == "eagle" or own_drafts == drafts)
    if kind == "mtp":
        assert run_drafting(model, with_some_embeds(ASKS[:3], model), speculative) == (tokens, drafts)


@pytest.mark.long
def test_prediction_modules_in_a_row_draft_alike(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3", tmp_path, num_modules=2)
    without_modules(folder, num_nextn_predict_layers=2)
    model = load(folder, torch.float64)
    speculative = {"method": "mtp", "model": str(folder), "num_speculative_tokens": 3, "auto": False}
    expected = run_drafting(model, ASKS, speculative)
    assert run_drafting(model, with_embeds(ASKS, model), speculative) == expected


def test_hidden_states_are_those_of_the_ids() -> None:
    model, prompt = tiny_model("llama"), prompt_of(5, 30)
    with Rig(model, max_num_batched_tokens=19) as rig:
        llm = LLM.around(rig.engine)
        own, other = llm.encode([prompt, {"prompt_embeds": embeds_of(model, prompt)}], PoolingParams(pooling="all"),
                                use_tqdm=False)
        assert own.outputs.data is not None and np.array_equal(own.outputs.data, other.outputs.data)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_worker_elsewhere_and_numpy(tmp_path: Path) -> None:
    folder = str(save_folder(tmp_path, CONFIGS["llama"], seed=3))
    embeds = embeds_of(random_model(CONFIGS["llama"], torch.float32, 3), SHARED).numpy()
    config = EngineConfig(folder, device="cpu", max_model_len=96, num_pages=32)
    with LLM.around(start_engine(config, in_process=True)) as llm:
        expected, found = llm.generate([SHARED, {"prompt_embeds": embeds}], greedy(6), use_tqdm=False)
        assert expected.outputs[0].token_ids == found.outputs[0].token_ids


def test_other_embeddings_and_ids_share_no_page() -> None:
    model = tiny_model("llama")
    embeds = embeds_of(model, SHARED)
    other = embeds.clone()
    other[-1, 0] += 1
    with Rig(model) as rig:
        rig.run([Ask([], greedy(2), embeds=embeds)])
        for ask in (Ask([0] * 32, greedy(2)), Ask(SHARED, greedy(2)), Ask([], greedy(2), embeds=other)):
            assert rig.run([ask])[0].metrics.num_cached_tokens == 0
        assert rig.run([Ask([], greedy(2), embeds=embeds)])[0].metrics.num_cached_tokens == 16


def test_keys_tell_embeddings_of_other_types_apart() -> None:
    """The bytes of values and positions together are equal: position 0 ends the doubles."""
    floats, positions = np.arange(1, 7, dtype=np.float32).reshape(3, 2), [0, 1, 2]
    doubles = np.frombuffer(floats.tobytes() + bytes(8), dtype=np.float64).reshape(2, 2)
    one, other = place_embeds(floats, positions, 3), place_embeds(doubles, [1, 2], 3)
    assert one.cache_key != other.cache_key


@pytest.mark.parametrize(("embeds", "message"), [
    ([[0.5] * HIDDEN], "must be a numpy array or a torch tensor"),
    (np.zeros((3, HIDDEN + 1)), rf"floats of shape \[tokens, {HIDDEN}\], got float64 of shape \[3, {HIDDEN + 1}\]"),
    (np.zeros(HIDDEN), "floats of shape"),
    (torch.zeros(3, HIDDEN, dtype=torch.int8), "got int8 of shape"),
    (np.zeros((0, HIDDEN)), "the prompt is empty"),
    (np.zeros((96, HIDDEN)), "96 tokens and max_model_len is 96"),
    (torch.full((3, HIDDEN), torch.nan, dtype=torch.bfloat16), "hold NaN, infinity"),
])
def test_what_are_no_embeddings_is_refused(embeds: Any, message: str) -> None:
    with Rig(tiny_model("llama")) as rig, pytest.raises(ValueError, match=message):
        rig.engine.checks.check({"prompt_embeds": embeds}, greedy(2))


@pytest.mark.parametrize(("given", "message"), [
    ({"prompt_token_ids": [5, 6, 7], "prompt_embeds_positions": [0]}, "says where prompt_embeds stand among"),
    ({"prompt_embeds": np.zeros((1, HIDDEN)), "prompt_embeds_positions": [0]}, "among the tokens of 'prompt' or"),
    *(({"prompt_token_ids": [5, 6, 7], "prompt_embeds": np.zeros((2, HIDDEN)), "prompt_embeds_positions": positions},
       message) for positions, message in (
        ([0, 3], "rising positions from 0 to 2 .the prompt has 3 tokens"), ([1, 0], "rising"), ([1, 1], "rising"),
        ([0, 1.0], "rising"), ([-1, 0], "rising"), ([], "rising"), ([1], "2 embeddings and .*positions has 1"),
        ("01", "prompt_embeds_positions must be a list"))),
])
def test_positions_that_embeddings_cannot_have_are_refused(given: dict[str, Any], message: str) -> None:
    with Rig(tiny_model("llama")) as rig, pytest.raises(ValueError, match=message):
        rig.engine.checks.check(given, greedy(2))


def test_what_reads_ids_needs_them() -> None:
    embeds = np.zeros((3, HIDDEN), dtype=np.float16)
    with Rig(tiny_model("llama"), tokenizer=byte_tokenizer()) as rig:
        for fields in ({"prompt_logprobs": 1}, {"repetition_penalty": 1.5}, {"bad_words": ["x"]}):
            with pytest.raises(ValueError, match=f"{next(iter(fields))} reads the token ids of the prompt"):
                rig.engine.checks.check({"prompt_embeds": embeds}, greedy(2, **fields))
            rig.engine.checks.check({"prompt_embeds": embeds, "prompt_token_ids": [5, 6, 7]}, greedy(2, **fields))
        with pytest.raises(ValueError, match="prompt_embeds has 3 tokens and prompt_token_ids has 2"):
            rig.engine.checks.check({"prompt_embeds": embeds, "prompt_token_ids": [5, 6]}, greedy(2))
