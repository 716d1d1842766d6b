"""A pause in four modes: running requests end, run to their ends, are computed again, or go on with what they have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, AsyncLLM, RequestOutput
from outrider.core.outputs import CompletionOutput
from outrider.mixers.recurrent import RecurrentRows
from tests.engine.harness import greedy, prompt_of, with_other_weights
from tests.engine.test_update_weights import llama, mtp, speculative
from tests.models.oracle import hf_model, make_folder

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_model_len": 128, "max_num_seqs": 3,
                            "num_pages": 128, "enable_prefix_caching": True}
MODELS: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "attention, ngram": lambda path: (make_folder("llama", path / "llama"), speculative("ngram")),
    "Mamba-2, mtp": mtp("nemotron_h"),
    "gated delta, mtp": mtp("qwen3_5_moe"),
}
LENGTH = 40
FEW = [5, 6, 7, 8]  # tokens of answers in which drafts of n-grams are accepted
PROMPTS = [prompt_of(3, 20), prompt_of(4, 8) * 4]


@dataclass
class Made:
    folder: Path
    other: Path
    settings: dict[str, Any]


@pytest.fixture(params=[*list(MODELS)[:2], pytest.param("gated delta, mtp", marks=pytest.mark.long)])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    folder, drafts = MODELS[request.param](tmp_path)
    return Made(folder, with_other_weights(folder, tmp_path / "other"), SETTINGS | {"speculative_config": drafts})


def whole(llm: LLM, prompts: list[list[int]], length: int = LENGTH, **fields: Any) -> list[CompletionOutput]:
    params = greedy(length, ignore_eos=True, **fields)
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def begin(llm: LLM, prompts: list[list[int]], least: int = 8, **fields: Any) -> list[str]:
    """Add requests, and make steps until each has some tokens. Returns their ids."""
    ids = [f"{len(prompt)}-{index}" for index, prompt in enumerate(prompts)]
    for name, prompt in zip(ids, prompts, strict=True):
        llm.llm_engine.add_request(name, prompt, greedy(LENGTH, ignore_eos=True, **fields))
    found: dict[str, RequestOutput] = {}
    while len(found) < len(ids) or min(len(output.outputs[0].token_ids) for output in found.values()) < least:
        found |= {output.request_id: output for output in llm.llm_engine.step()}
    return ids


def step_to_ends(llm: LLM) -> dict[str, CompletionOutput]:
    found: dict[str, CompletionOutput] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0]
    return found


def no_page_is_known(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    return scheduler.cache.pool.forget_cached()


def test_abort_ends_requests_with_what_they_have(made: Made) -> None:
    with LLM(str(made.folder), **made.settings) as llm:
        expected = whole(llm, PROMPTS)
        ids = begin(llm, PROMPTS)
        llm.pause_generation()
        ended = step_to_ends(llm)
        for name, each in zip(ids, expected, strict=True):
            tokens = ended[name].token_ids
            assert ended[name].finish_reason == "abort" and 8 <= len(tokens) < LENGTH
            assert tokens == each.token_ids[: len(tokens)]
        assert no_page_is_known(llm) and llm.is_paused()
        llm.resume_generation()
        assert whole(llm, PROMPTS) == expected


def test_wait_runs_requests_to_their_ends(made: Made) -> None:
    with LLM(str(made.folder), **made.settings) as llm:
        expected = whole(llm, PROMPTS)
        ids = begin(llm, PROMPTS)
        llm.pause_generation("wait")
        assert not llm.engine.has_requests
        ended = step_to_ends(llm)
        assert [ended[name].token_ids for name in ids] == [each.token_ids for each in expected]
        assert {each.finish_reason for each in ended.values()} == {"length"}
        llm.llm_engine.add_request("late", PROMPTS[0], greedy(LENGTH, ignore_eos=True))
        assert llm.llm_engine.step() == [] and llm.is_paused()
        with pytest.raises(ValueError, match="requests must run, but the engine is paused"):
            llm.pause_generation("wait")
        llm.resume_generation()
        assert step_to_ends(llm)["late"].token_ids == expected[0].token_ids


def test_who_comes_while_others_run_to_their_ends_waits(tmp_path: Path) -> None:
    with LLM(str(llama(tmp_path)), **SETTINGS) as llm:
        begin(llm, PROMPTS)
        llm._loop.run(llm._maintenance.pause_when_done)
        late = threading.Thread(target=lambda: whole(llm, PROMPTS[:1]))
        late.start()
        llm._loop.step_until(llm._maintenance.is_done)
        assert late.is_alive() and not llm.engine.has_requests
        llm._maintenance.resume()
        late.join()


def test_kept_requests_are_computed_again_under_new_weights(made: Made) -> None:
    with LLM(str(made.folder), **made.settings) as llm:
        ids = begin(llm, PROMPTS)
        llm.pause_generation("keep")
        llm.update_weights(made.other)
        assert not llm.engine.has_work or llm.llm_engine.step()
        llm.resume_generation()
        ended = step_to_ends(llm)
        hits = whole(llm, PROMPTS)
    with LLM(str(made.other), **made.settings) as fresh:
        for name, prompt in zip(ids, PROMPTS, strict=True):
            (_, start, first), (version, again, end) = ended[name].weight_versions
            assert (start, version, again, end) == (0, 1, first, LENGTH) and first >= 8
            tokens = ended[name].token_ids
            assert whole(fresh, [prompt + tokens[:first]], LENGTH - first)[0].token_ids == tokens[first:]
        assert [each.token_ids for each in whole(fresh, PROMPTS)] == [each.token_ids for each in hits]


def continued(made: Made, prompt: list[int], old: list[int], length: int) -> list[int]:
    """What transformers generate: the cache of all tokens but the last is the old model's."""
    before, after = (hf_model(folder, torch.float64, experts_implementation="eager")
                     for folder in (made.folder, made.other))
    ids, tokens = torch.tensor([prompt + old]), []
    with torch.no_grad():
        cache = before(ids[:, :-1], use_cache=True).past_key_values
        given = ids[:, -1:]
        while len(tokens) < length:
            logits = after(given, past_key_values=cache, use_cache=True).logits[0, -1]
            tokens.append(FEW[int(logits[FEW].argmax())])
            given = torch.tensor([tokens[-1:]])
    return tokens


def test_requests_go_on_in_place_with_what_they_have_computed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[int] = []
    fold = RecurrentRows.fold_pending

    def counted(rows: RecurrentRows) -> None:
        pending.append(int(rows.pending.sum()))
        fold(rows)

    monkeypatch.setattr(RecurrentRows, "fold_pending", counted)
    prompt = PROMPTS[1]
    for least in range(8, 20):  # until drafts were accepted just before the pause
        with LLM(str(made.folder), **made.settings | {"speculative_config": speculative("ngram")}) as llm:
            (name,) = begin(llm, [prompt], least, allowed_token_ids=FEW)
            llm.pause_generation("keep", clear_cache=False)
            llm.update_weights(made.other)
            llm.resume_generation()
            output = step_to_ends(llm)[name]
            (_, start, first), (version, then, end) = output.weight_versions
            assert (start, version, then, end) == (0, 1, first, LENGTH) and first >= least
            assert no_page_is_known(llm), "pages of two versions are not published"
            hits = whole(llm, [prompt], allowed_token_ids=FEW)[0].token_ids
        tokens = output.token_ids
        assert tokens[first:] == continued(made, prompt, tokens[:first], LENGTH - first)
        if pending[-1] or not llm.engine.scheduler.cache.takes_checkpoints:
            break
    else:
        raise AssertionError(f"no drafts were pending: {pending}")
    with LLM(str(made.other), **made.settings) as fresh:
        assert whole(fresh, [prompt], allowed_token_ids=FEW)[0].token_ids == hits
        again = whole(fresh, [prompt + tokens[:first]], LENGTH - first, allowed_token_ids=FEW)[0].token_ids
        assert again != tokens[first:], "the mode makes a difference"


def test_a_request_in_place_that_is_preempted_is_computed_again(made: Made) -> None:
    prompt = PROMPTS[0]
    with LLM(str(made.folder), **made.settings) as llm:
        (name,) = begin(llm, [prompt])
        llm.pause_generation("keep", clear_cache=False)
        llm.update_weights(made.other)
        llm.reset_prefix_cache(reset_running_requests=True)
        llm.resume_generation()
        output = step_to_ends(llm)[name]
        first = output.weight_versions[0][2]
        assert llm.engine.scheduler.cache.pool._page_of, "its pages are of one version again"
    with LLM(str(made.other), **made.settings) as fresh:
        tokens = output.token_ids
        assert whole(fresh, [prompt + tokens[:first]], LENGTH - first)[0].token_ids == tokens[first:]


def test_asyncio_callers_pause_in_all_modes(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    other = with_other_weights(folder, tmp_path / "other")

    async def main() -> None:
        async with AsyncLLM(str(folder), **SETTINGS) as llm:
            async def read(least: asyncio.Event | None = None) -> CompletionOutput:
                async for output in llm.generate(PROMPTS[0], greedy(LENGTH, ignore_eos=True)):
                    if least is not None and len(output.outputs[0].token_ids) >= 4:
                        least.set()
                return output.outputs[0]

            async def started() -> asyncio.Task[CompletionOutput]:
                has_some = asyncio.Event()
                task = asyncio.create_task(read(has_some))
                await has_some.wait()
                return task

            expected = await read()
            running = await started()
            await llm.pause_generation()
            aborted = await running
            assert aborted.finish_reason == "abort" and len(aborted.token_ids) < LENGTH
            await llm.resume_generation()
            running = await started()
            await llm.pause_generation(mode="wait")
            assert (await running) == expected
            await llm.resume_generation()
            running = await started()
            await llm.pause_generation(mode="keep", clear_cache=False)
            await llm.update_weights(other)
            await llm.resume_generation()
            (old, _, first), (new, _, _) = (await running).weight_versions
            assert (old, new) == (0, 1) and 4 <= first < LENGTH

    asyncio.run(main())
