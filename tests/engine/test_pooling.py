"""Embeddings: hidden states of prompts, pooled, against transformers, whatever chunks, mates and preemptions do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, PoolingParams, SamplingParams
from outrider.config import EngineConfig
from outrider.core import HiddenReport
from outrider.engine.start import start_engine
from tests.engine.harness import prompt_of
from tests.models.oracle import hf_model, make_folder

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 24,
                            "page_size": 16, "num_pages": 64}
PROMPTS = [prompt_of(1, 45), prompt_of(2, 1), [*prompt_of(1, 45)[:33], 7, 8, 9], prompt_of(3, 128)]
KINDS = {name: PoolingParams(pooling=name, normalize=False) for name in ("last", "mean", "all")}


@pytest.fixture(scope="module", params=["llama", "gemma3", "bamba"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(request.param, tmp_path_factory.mktemp("pooling") / request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[np.ndarray]:
    """Hidden states after the final norm, of every token of every prompt."""
    model = hf_model(folder, attn_implementation="eager")
    with torch.no_grad():
        return [model.model(torch.tensor([prompt])).last_hidden_state[0].float().numpy() for prompt in PROMPTS]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(str(folder), dtype="float32", **SETTINGS) as llm:
        yield llm
        llm.engine.scheduler.check_integrity()
        assert llm.engine.scheduler.cache.usage() == 0.0


def pooled(states: np.ndarray, kind: str) -> np.ndarray:
    return {"last": states[-1], "mean": states.mean(axis=0), "all": states}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_equal_those_of_transformers(llm: LLM, expected: list[np.ndarray], kind: str) -> None:
    for _ in range(2):  # the second time pages of the prompts are cached
        outputs = llm.encode([list(prompt) for prompt in PROMPTS], KINDS[kind])
        for output, states in zip(outputs, expected, strict=True):
            assert output.finished and output.outputs.data is not None
            np.testing.assert_allclose(output.outputs.data, pooled(states, kind), atol=2e-4, rtol=1e-3)
    # The last token's state is right after a prefix hit; the others need every token.
    assert (outputs[0].num_cached_tokens > 0) == (kind == "last")


def test_embeddings_have_length_one_and_the_dimensions_asked_for(llm: LLM, expected: list[np.ndarray]) -> None:
    (output,) = llm.embed([PROMPTS[0]], PoolingParams(pooling="mean", dimensions=5))
    mean = expected[0].mean(axis=0)[:5]
    np.testing.assert_allclose(output.outputs.embedding, mean / np.linalg.norm(mean), atol=1e-4)
    scores = [output.outputs.score for output in llm.score(PROMPTS[0], [PROMPTS[0], PROMPTS[2]])]
    assert scores[0] == pytest.approx(1, abs=1e-4) and -1 <= scores[1] < 1


def test_beside_requests_that_generate_nothing_changes(llm: LLM, expected: list[np.ndarray]) -> None:
    """A batch of both kinds: texts are those of a batch of one kind, and so are the hidden states."""
    params = SamplingParams(temperature=0, max_tokens=12)
    alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], params)]
    both = llm._run([*PROMPTS[:2], *PROMPTS], [params, params, *[KINDS["mean"]] * 4], 0, False)
    assert [output.outputs[0].token_ids for output in both[:2]] == alone  # type: ignore[union-attr, index]
    for output, states in zip(both[2:], expected, strict=True):
        np.testing.assert_allclose(output.outputs.data, states.mean(axis=0), atol=2e-4, rtol=1e-3)  # type: ignore


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3, "auto": False}])
def test_preempted_and_in_a_process(tmp_path: Path, drafts: dict[str, Any] | None) -> None:
    """A pool too small for all, results through a pipe; nothing is sampled or drafted for such a request."""
    folder = make_folder("llama", tmp_path / "llama")
    config = EngineConfig(str(folder), dtype="float32", speculative_config=drafts, **SETTINGS | {"num_pages": 14})
    prompts = [prompt_of(seed, 60) for seed in range(6)]
    with LLM(str(folder), dtype="float32", **SETTINGS) as plain:
        wanted = [output.outputs.data for output in plain.encode(prompts, KINDS["mean"])]
    with LLM.around(start_engine(config, in_process=True)) as llm:
        mixed = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), KINDS["mean"]]
        found = llm._run([prompt for prompt in prompts for _ in mixed], mixed * len(prompts), 0, False)
        assert llm.engine.scheduler.stats.num_preemptions > 0
        for output, data in zip(found[1::2], wanted, strict=True):
            np.testing.assert_allclose(output.outputs.data, data, atol=2e-4, rtol=1e-3)  # type: ignore[union-attr]


def test_no_logit_row_and_no_draft_belongs_to_such_a_request(tmp_path: Path) -> None:
    from outrider.core import ScheduledBatch
    from tests.engine.harness import Rig, tiny_model

    rig = Rig(tiny_model("llama"), speculative_config={"method": "ngram", "num_speculative_tokens": 3, "auto": False})
    with LLM.around(rig.engine) as llm:
        llm.encode([prompt_of(1, 40), prompt_of(2, 80)], KINDS["mean"])
    batches: list[ScheduledBatch] = rig.batches
    assert sum(sum(batch.num_known) for batch in batches) == 120
    assert not any(any(batch.samples) or any(batch.num_drafts) for batch in batches)
    assert {admission.request.hidden for batch in batches for admission in batch.admissions} == {HiddenReport.SUM}


def test_hidden_states_that_are_not_finite_end_the_request(tmp_path: Path) -> None:
    from tests.engine.harness import CONFIGS, Rig, random_model

    model = random_model(CONFIGS["llama"], torch.float32, 0)
    model.norm.weight[3] = float("nan")  # type: ignore[attr-defined]
    with LLM.around(Rig(model).engine) as llm, pytest.raises(RuntimeError, match="hidden states are not finite"):
        llm.embed([[1, 2, 3]])


@pytest.mark.parametrize(("call", "words"), [
    (lambda llm: llm.embed([[1]], PoolingParams(dimensions=9999)), "dimensions=9999 exceeds the"),
    (lambda llm: llm.embed([[1]], PoolingParams(pooling="all")), "use LLM.encode"),
    (lambda llm: llm.embed([[1] * 129]), "129 tokens"),
    (lambda llm: llm.embed([[]]), "the prompt is empty"),
    (lambda llm: llm.score([[1], [2]], [[1], [2], [3]]), "data_1 has 2 texts and data_2 has 3"),
    (lambda llm: llm.encode([[1]], pooling_task="classify"), "this model has no head that classifies"),
    (lambda llm: llm.encode([[1]], pooling_task="plugin"), "pooling_task must be"),
    (lambda llm: PoolingParams(pooling="cls"), "pooling must be one of last, mean, all"),
    (lambda llm: PoolingParams(task="score"), "task must be one of embed, classify, token_embed"),
    (lambda llm: PoolingParams(task="classify", pooling="mean"), "for classes, pooling must be 'last' or 'all'"),
    (lambda llm: PoolingParams(dimension=3), "did you mean dimensions"),
])
def test_bad_values_are_refused_by_name(llm: LLM, call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(llm)
