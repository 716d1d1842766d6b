"""Scores of given tokens: those that sampling reports, to the bit, raw and processed, whatever ran beside."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams, StructuredOutputsParams
from outrider.core.outputs import Logprob, RequestOutput
from outrider.kernels import cpu as native
from outrider.logits_processors import LogitsProcessor
from outrider.sample.logprobs import LogprobRows, logprob_rows
from outrider.token_scores import Scoring, TokenScores
from tests.engine.harness import prompt_of, save_folder
from tests.engine.test_exact_mode import FAMILIES, VOCAB

TOP = 4
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
ENGINE: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "num_pages": 64, "max_logprobs": -1,
                          "skip_tokenizer_init": True, "max_num_batched_tokens": 48}
SHARED = prompt_of(0, 34, VOCAB)
PROMPTS = [[*SHARED, *prompt_of(index, 5 + index, VOCAB)] for index in range(4)]
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01}, {"temperature": 1.3, "top_k": 7},
    {"temperature": 1, "logit_bias": {5: 3.0, 9: -2.0}, "allowed_token_ids": [*range(3, 60)], "top_p": 0.8},
    {"temperature": 0.6, "bad_words_token_ids": ((7,), (5, 6))},
]


def folder_of(family: str, path: Path) -> str:
    return str(save_folder(path / family, FAMILIES[family]))


def sampled(llm: LLM, params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Answers with drafts, some of them accepted, after a prefix hit."""
    llm.generate([SHARED], SamplingParams(max_tokens=1), use_tqdm=False)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert any(output.num_cached_tokens for output in outputs)
    assert sum(output.metrics.num_draft_tokens for output in outputs)
    return outputs


def assert_equal(outputs: Sequence[RequestOutput], scores: Sequence[TokenScores]) -> None:
    """The scores of prompt and answer have the bits that sampling reported for the answer."""
    for output, own in zip(outputs, scores, strict=True):
        (sample,), start = output.outputs, len(output.prompt_token_ids)
        assert own.token_ids == output.prompt_token_ids + sample.token_ids and sample.logprobs is not None
        for at, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True), start):
            assert own.logprobs[at] == entry[token].logprob and own.ranks[at] == entry[token].rank
            likeliest = list(entry.items())[len(entry) - TOP :]
            assert own.top_ids[at] == [other for other, _ in likeliest]
            assert own.top_logprobs[at] == [value.logprob for _, value in likeliest]


def sequences(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


@pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "nemotron_h"])
def test_raw_scores_have_the_bits_of_sampling(family: str, tmp_path: Path) -> None:
    params = [SamplingParams(max_tokens=24, logprobs=TOP, ignore_eos=True, seed=index, **own)
              for index, own in enumerate([{"allowed_token_ids": [4, 5]}, *FILTERS[:3]])]
    with LLM(folder_of(family, tmp_path), exact=True, speculative_config=DRAFTS, **ENGINE) as llm:
        outputs = sampled(llm, params)
        assert sum(output.metrics.num_accepted_tokens for output in outputs)
        scores = llm.score_tokens(sequences(outputs), TOP, use_tqdm=False)
        assert_equal(outputs, scores)
        alone = [llm.score_tokens(ids, TOP, use_tqdm=False) for ids in sequences(outputs)]
        assert [each for (each,) in alone] == scores
        asked = SamplingParams(max_tokens=1, prompt_logprobs=TOP, temperature=0)
        for output, own in zip(llm.generate(sequences(outputs), asked, use_tqdm=False), scores, strict=True):
            assert own.logprobs[0] is own.top_ids[0] is None and own.kept_ids is None
            for token, entry, logprob in zip(own.token_ids, output.prompt_logprobs or [], own.logprobs, strict=True):
                assert entry is None or entry[token].logprob == logprob


@pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_processed_scores_have_the_bits_of_sampling(family: str, tmp_path: Path) -> None:
    with LLM(folder_of(family, tmp_path), exact=True, logprobs_mode="processed", speculative_config=DRAFTS,
             **ENGINE) as llm:
        for own in FILTERS:
            params = SamplingParams(max_tokens=20, logprobs=TOP, ignore_eos=True, seed=3, **own)
            outputs = sampled(llm, [params] * len(PROMPTS))
            scores = llm.score_tokens(sequences(outputs), TOP, params, logprobs_mode="processed_logprobs",
                                      use_tqdm=False)
            assert_equal(outputs, scores)
            raw = llm.score_tokens(sequences(outputs), TOP, use_tqdm=False)
            assert all(one.logprobs != other.logprobs for one, other in zip(raw, scores, strict=True))


def test_kept_ids_are_those_that_could_be_sampled(tmp_path: Path) -> None:
    with LLM(folder_of("llama", tmp_path), exact=native.available(), logprobs_mode="processed", **ENGINE) as llm:
        for own in FILTERS:
            params = SamplingParams(max_tokens=12, logprobs=-1, ignore_eos=True, seed=3, **own)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            scores = llm.score_tokens(sequences(outputs), 1, params, logprobs_mode="processed", return_kept_ids=True,
                                      use_tqdm=False)
            for output, found in zip(outputs, scores, strict=True):
                start = len(output.prompt_token_ids)
                assert found.kept_ids is not None and found.kept_ids[0] is None
                assert all(top is None or len(top) == 1 for top in found.top_ids)
                for entry, kept in zip(output.outputs[0].logprobs or [], found.kept_ids[start:], strict=True):
                    assert kept == [token for token, value in entry.items() if value.logprob > -inf]
                for token, kept, logprob in zip(found.token_ids, found.kept_ids, found.logprobs, strict=True):
                    assert kept is None or (token in kept) == (logprob is not None and logprob > -inf)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_modes_that_share_a_step_do_not_mix(dtype: str, tmp_path: Path) -> None:
    """Raw and processed prompts of one batch have the scores that they have alone."""
    params = [SamplingParams(max_tokens=1, prompt_logprobs=2, prompt_logprobs_mode="processed" if index % 2 else "raw",
                             temperature=0.7, top_k=5) for index in range(4)]
    with LLM(folder_of("gemma3", tmp_path), dtype=dtype, **ENGINE | {"max_num_batched_tokens": 256}) as llm:
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        alone = [llm.generate([prompt], own, use_tqdm=False)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
        for one, other in zip(together, alone, strict=True):
            for entry, same in zip((one.prompt_logprobs or [])[1:], (other.prompt_logprobs or [])[1:], strict=True):
                assert entry is not None and same is not None and entry.keys() == same.keys()
                assert [value.logprob for value in entry.values()] == pytest.approx(
                    [value.logprob for value in same.values()], abs=1e-4)
        lowest = [min(value.logprob for entry in output.prompt_logprobs[1:] for value in entry.values())
                  for output in together]
        assert lowest[1] == lowest[3] == -inf < min(lowest[0], lowest[2])


def test_a_request_with_many_likeliest_tokens_does_not_widen_the_others(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[tuple[int, int]] = []

    def reported(logits: torch.Tensor, chosen: torch.Tensor, num: int) -> LogprobRows:
        widths.append((len(logits), num))
        return logprob_rows(logits, chosen, num)

    monkeypatch.setattr("outrider.runner.prompt_reports.logprob_rows", reported)
    nums = [2, -1, 0, 2]
    params = [SamplingParams(max_tokens=1, prompt_logprobs=num) for num in nums]
    with LLM(folder_of("llama", tmp_path), exact=native.available(),
             **ENGINE | {"max_num_batched_tokens": 256}) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert sum(rows for rows, num in widths if num == -1) == len(PROMPTS[1])
        for prompt, own, output in zip(PROMPTS, params, outputs, strict=True):
            (alone,) = llm.generate([prompt], own, use_tqdm=False)
            if native.available():
                assert output.prompt_logprobs == alone.prompt_logprobs
            assert {len(entry) for entry in output.prompt_logprobs[1:]} <= {
                VOCAB if own.prompt_logprobs < 0 else own.prompt_logprobs + extra for extra in (0, 1)}


def test_no_step_after_the_prompt_reports_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even beside another prompt: each logit row is one more product with the model's largest matrix."""
    rows: list[int] = []

    def reported(logits: torch.Tensor, chosen: torch.Tensor, num: int) -> LogprobRows:
        rows.append(len(logits))
        return logprob_rows(logits, chosen, num)

    monkeypatch.setattr("outrider.runner.prompt_reports.logprob_rows", reported)
    params = [SamplingParams(max_tokens=num, prompt_logprobs=1, ignore_eos=True) for num in (12, 2, 2, 2)]
    with LLM(folder_of("llama", tmp_path), **ENGINE | {"max_num_batched_tokens": 16, "overlap": False}) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.prompt_logprobs or ()) for output in outputs] == list(map(len, PROMPTS))
    assert sum(rows) == sum(map(len, PROMPTS))


def test_what_no_prompt_can_tell_is_refused(tmp_path: Path) -> None:
    with LLM(folder_of("llama", tmp_path), **ENGINE | {"max_logprobs": 5}) as llm:
        ids = [1, 2, 3]
        for params, words in (({"presence_penalty": 1}, "presence_penalty"), ({"min_tokens": 2}, "min_tokens"),
                              ({"structured_outputs": StructuredOutputsParams(regex="a")}, "structured_outputs"),
                              ({"receipt": True}, "receipt")):
            with pytest.raises(ValueError, match=f"{words}.* where (an|the) answer begins"):
                llm.score_tokens(ids, 0, SamplingParams(**params), logprobs_mode="processed")
        for arguments, words in (({"sampling_params": SamplingParams(top_k=2)}, "set logprobs_mode='processed'"),
                                 ({"return_kept_ids": True}, "only processed scores leave tokens out"),
                                 ({"top_k": -2}, "top_k"), ({"logprobs_mode": "logits"}, "logprobs_mode"),
                                 ({"top_k": 9}, "exceeds max_logprobs=5"),
                                 ({"logprobs_mode": "processed", "return_kept_ids": True}, "max_logprobs=5")):
            with pytest.raises(ValueError, match=words):
                llm.score_tokens(ids, **arguments)
        with pytest.raises(ValueError, match="leaves no room"):
            llm.score_tokens([[1] * 128])


class Shifted(LogitsProcessor):
    """Changes nothing."""

    def __init__(self, *_: Any) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None: ...

    def apply(self, logits: Any) -> Any:
        return logits


def test_logits_processors_see_no_prompt(tmp_path: Path) -> None:
    with LLM(folder_of("llama", tmp_path), logits_processors=[Shifted], **ENGINE) as llm:
        with pytest.raises(ValueError, match="beside logits processors.*use prompt_logprobs_mode='raw'"):
            llm.score_tokens([1, 2, 3], logprobs_mode="processed", use_tqdm=False)
        assert llm.score_tokens([1, 2, 3], use_tqdm=False)[0].logprobs[1]


def test_scores_say_which_weights_they_are_of(tmp_path: Path) -> None:
    other = save_folder(tmp_path / "other", FAMILIES["llama"], seed=5)
    with LLM(folder_of("llama", tmp_path), **ENGINE) as llm:
        (before,) = llm.score_tokens([1, 2, 3], use_tqdm=False)
        llm.update_weights(str(other))
        (after,) = llm.score_tokens([1, 2, 3], use_tqdm=False)
    assert (before.weights_version, after.weights_version) == (0, 1) and before.logprobs != after.logprobs
    assert before.weight_versions == [(0, 0, 3)] and after.weight_versions == [(1, 0, 3)]


Rows = list[dict[int, Logprob] | None]


def updated_in_its_prompt(llm: LLM, weights: str, params: SamplingParams, in_place: bool) -> tuple[RequestOutput, int]:
    """The output of a prompt during which the weights were updated, and how many rows it had by then."""
    llm.llm_engine.add_request("a", LONG, params)
    before: Rows = [None]
    while len(before) < 20:
        for output in llm.llm_engine.step():
            before = list(output.prompt_logprobs or before)
    if in_place:
        llm.pause_generation("keep", clear_cache=False)
    llm.update_weights(weights)
    llm.resume_generation()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            last = output
    return last, len(before)


LONG = prompt_of(7, 90, VOCAB)
CHUNKS = ENGINE | {"max_num_batched_tokens": 16, "dtype": "float64", "overlap": False}


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_of_two_versions_are_never_mixed_silently(in_place: bool, tmp_path: Path) -> None:
    """A prompt that is computed again after an update has rows of the new weights alone. One that goes on in place says
    which rows are of which weights, and its scores are of no single version."""
    folder = folder_of("llama", tmp_path)
    other = str(save_folder(tmp_path / "other", FAMILIES["llama"], seed=5))
    scoring = Scoring.from_arguments(None, 0, "raw", return_kept_ids=False)
    with LLM(folder, **CHUNKS) as llm, LLM(other, **CHUNKS) as fresh:
        (old,), (new,) = ([own.logprobs for own in each.score_tokens(LONG, use_tqdm=False)] for each in (llm, fresh))
        output, num_before = updated_in_its_prompt(llm, other, scoring.params, in_place)
        assert 20 <= num_before < len(LONG)
        scores = scoring.read(output, VOCAB)
    assert scores.weight_versions == output.prompt_weight_versions
    if not in_place:
        assert scores.weights_version == 1 and scores.weight_versions == [(1, 0, len(LONG))]
        assert scores.logprobs[1:] == pytest.approx(new[1:], abs=1e-9)
        return
    (_, start, first), (version, then, end) = scores.weight_versions
    assert scores.weights_version is None and (start, version, then, end) == (0, 1, first, len(LONG))
    assert num_before <= first and scores.logprobs[1:first] == pytest.approx(old[1:first], abs=1e-9)
    assert scores.logprobs[first:] != pytest.approx(old[first:], abs=1e-3)


def test_a_prompt_that_was_done_keeps_its_rows(tmp_path: Path) -> None:
    """They are of one version, and its tokens of two."""
    folder, other = folder_of("llama", tmp_path), str(save_folder(tmp_path / "other", FAMILIES["llama"], seed=5))
    with LLM(folder, **CHUNKS) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0, ignore_eos=True)
        outputs = llm.stream(LONG, params)
        before = next(output for output in outputs if len(output.outputs[0].token_ids) > 3).prompt_logprobs
        before = list(before or [])
        llm.update_weights(other)
        *_, last = outputs
    assert last.prompt_logprobs == before and last.prompt_weight_versions == [(0, 0, len(LONG))]
    assert [version for version, _, _ in last.outputs[0].weight_versions] == [0, 1]
