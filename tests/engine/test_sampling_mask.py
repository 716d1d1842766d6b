"""Sampling masks: the ids that top-k, top-p and min-p kept where a token was sampled, as transformers' filters keep
them, with drafts, prefix hits, chunks and stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core.outputs import CompletionOutput, RequestOutput
from tests.engine.harness import prompt_of
from tests.models.oracle import hf_model, make_folder

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
ENGINE: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 4, "num_pages": 96, "dtype": "float64",
                          "skip_tokenizer_init": True, "max_num_batched_tokens": 24,
                          "logprobs_mode": "processed_logprobs"}
SHARED = prompt_of(0, 34)
PROMPTS = [[*SHARED, *prompt_of(index, 3 + index)] for index in range(4)]
FILTERS: list[dict[str, Any]] = [{"top_k": 2, "allowed_token_ids": [4, 5, 6]},
                                 {"top_k": 9, "top_p": 0.7, "temperature": 0.4},
                                 {"top_p": 0.5, "temperature": 0.3}, {"min_p": 0.4, "temperature": 0.5}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama", tmp_path_factory.mktemp("models") / "llama")


def asked(index: int, **more: Any) -> SamplingParams:
    usual = {"max_tokens": 20, "ignore_eos": True, "seed": index, "return_sampling_mask": True, "temperature": 1.0}
    return SamplingParams(**usual | FILTERS[index] | more)


def kept_by_transformers(model: Any, ids: Sequence[int], params: SamplingParams) -> set[int]:
    """The ids that transformers' own filters leave after these tokens, in this engine's order: min-p, top-k, top-p."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = model(torch.tensor([list(ids)])).logits[:, -1].double()
    if params.allowed_token_ids is not None:
        others = [token for token in range(scores.shape[1]) if token not in params.allowed_token_ids]
        scores[:, others] = -torch.inf
    scores = TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return set(scores[0].isfinite().nonzero().flatten().tolist())


def mask_of(sample: CompletionOutput) -> list[list[int] | None]:
    assert sample.sampling_mask is not None
    return sample.sampling_mask.token_ids


def run(llm: LLM) -> list[RequestOutput]:
    llm.generate([SHARED], SamplingParams(max_tokens=1), use_tqdm=False)
    return llm.generate(PROMPTS, [asked(index) for index in range(4)], use_tqdm=False)


@torch.inference_mode()
def test_the_mask_has_what_transformers_filters_keep(folder: Path) -> None:
    model = hf_model(folder, attn_implementation="eager").double()
    with LLM(str(folder), speculative_config=DRAFTS, **ENGINE) as llm:
        outputs = run(llm)
    assert any(output.num_cached_tokens for output in outputs)
    assert sum(output.metrics.num_accepted_tokens for output in outputs)
    sizes = set()
    for index, output in enumerate(outputs):
        (sample,) = output.outputs
        assert sample.logprobs is None, "log-probabilities that were not asked for"
        assert len(mask_of(sample)) == len(sample.token_ids) == 20
        for at, (token, kept) in enumerate(zip(sample.token_ids, mask_of(sample), strict=True)):
            assert kept is not None and token in kept
            ids = [*output.prompt_token_ids, *sample.token_ids[:at]]
            assert set(kept) == kept_by_transformers(model, ids, asked(index))
            sizes.add(len(kept))
    assert len(sizes) > 3, "some filter follows the logits"


def test_drafts_change_no_mask(folder: Path) -> None:
    found = []
    for settings in ({"speculative_config": DRAFTS}, {"enable_prefix_caching": False}):
        with LLM(str(folder), **ENGINE, **settings) as llm:
            found.append([(own.outputs[0].token_ids, mask_of(own.outputs[0])) for own in run(llm)])
    assert found[0] == found[1]


def test_asked_logprobs_stay_as_many_as_were_asked_for(folder: Path) -> None:
    with LLM(str(folder), **ENGINE) as llm:
        (plain, masked) = (llm.generate([PROMPTS[0]], asked(1, logprobs=2, return_sampling_mask=own), use_tqdm=False)
                           for own in (False, True))
        (one,), (other,) = plain[0].outputs, masked[0].outputs
        assert one.logprobs == other.logprobs and one.token_ids == other.token_ids
        assert one.sampling_mask is None and dict(one.extras) == {}
        every = llm.generate([PROMPTS[0]], asked(1, n=3, stop_token_ids=[other.token_ids[4]]), use_tqdm=False)
        assert all(len(mask_of(own)) == len(own.token_ids) for own in every[0].outputs)


def test_more_ids_than_can_be_reported_are_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.core.params.MAX_KEPT_IDS", 12)
    with LLM(str(folder), **ENGINE) as llm:
        (output,) = llm.generate([PROMPTS[0]], asked(2, temperature=1.5, top_p=0.9), use_tqdm=False)
    assert mask_of(output.outputs[0]).count(None) > 10


def test_a_setting_asks_for_every_request_that_filters(folder: Path) -> None:
    with LLM(str(folder), return_sampling_mask=True, **ENGINE) as llm:
        params = [asked(0, return_sampling_mask=False), SamplingParams(temperature=0, top_k=5), SamplingParams()]
        found = llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
        assert [own.outputs[0].sampling_mask is not None for own in found] == [True, False, False]
        assert not params[0].return_sampling_mask, "the caller's own parameters stay as they were"


def test_an_aborted_sample_has_the_masks_of_its_tokens(folder: Path) -> None:
    with LLM(str(folder), **ENGINE) as llm:
        llm.llm_engine.add_request("a", PROMPTS[0], asked(0, max_tokens=60))
        while not any(isinstance(own, RequestOutput) and own.outputs[0].token_ids for own in llm.llm_engine.step()):
            continue
        llm.pause_generation()
        (output,) = [own for own in llm.llm_engine.step() if isinstance(own, RequestOutput) and own.finished]
    sample = output.outputs[0]
    assert sample.finish_reason == "abort" and sample.token_ids
    assert len(mask_of(sample)) == len(sample.token_ids)


@pytest.mark.parametrize(("settings", "params", "words"), [
    ({"logprobs_mode": "raw"}, {"top_k": 5}, "logprobs_mode='processed_logprobs'"),
    ({}, {"top_k": 5, "temperature": 0}, "no filter drops a token"),
    ({}, {}, "no filter drops a token"),
    ({}, {"top_k": 3000}, "lower top_k"),
])
def test_masks_that_cannot_be_are_refused(folder: Path, settings: dict[str, Any], params: dict[str, Any],
                                          words: str) -> None:
    with LLM(str(folder), **ENGINE | settings) as llm, pytest.raises(ValueError, match=words):
        llm.generate([PROMPTS[0]], SamplingParams(return_sampling_mask=True, **params), use_tqdm=False)
