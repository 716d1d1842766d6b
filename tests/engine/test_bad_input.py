"""Bad input gets a clear error and harms nothing: the engine serves the next request as if it had not been asked.

What shows only while a request runs (NaN, nothing left to choose) ends that request, never its batch mates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.models.base import Model
from tests.engine.harness import (
    CONFIGS,
    VOCAB,
    Ask,
    Rig,
    add_request,
    greedy,
    prompt_of,
    random_model,
    save_folder,
    tiny_model,
)

SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "num_pages": 32}
LLAMA = CONFIGS["llama"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "llama", LLAMA)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **SMALL)


def copy_with(folder: Path, path: Path, **config: Any) -> Path:
    """The model under another config, or with other weights to come."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA | config))
    save_file(load_file(folder / "model.safetensors"), path / "model.safetensors")
    return path


# Requests

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([[]], "the prompt is empty"),
    "as long as max_model_len": ([[5] * 64], "64 tokens and max_model_len is 64"),
    "longer": ([[5] * 65], "65 tokens and max_model_len is 64"),
    "negative id": ([[5, -1]], "-1 is outside the vocabulary of 256"),
    "id beyond the vocabulary": ([[5, VOCAB]], "256 is outside the vocabulary of 256"),
    "fractional id": ([[5, 1.5]], "must be integers, got 1.5"),
    "text id": ([["a"]], "must be integers, got 'a'"),
    "text without a tokenizer": ("hello", "no tokenizer files, or skip_tokenizer_init is set: give prompts as"),
    "dict without a prompt": ({"text": "x"}, "needs 'prompt', 'prompt_token_ids' or 'prompt_embeds', got text"),
    "dict with odd keys": ({5: 5}, "needs 'prompt', 'prompt_token_ids' or 'prompt_embeds', got 5"),
    "ids that are a number": ({"prompt_token_ids": 5}, "prompt_token_ids must be a list or a tuple or None, got 5"),
    "text that is a number": ({"prompt": 5}, "prompt must be a text or None, got 5"),
    "salt that is a number": ({"prompt_token_ids": [5], "cache_salt": 5}, "cache_salt must be a text or None, got 5"),
    "half a pair of a character": ([{"prompt_token_ids": [5], "cache_salt": "\ud800"}], "cache_salt must be a text or"),
    "nothing": (None, "prompts must be one or several of a text, token ids and a dict, got None"),
    "number": ([1.5], "a text, token ids or a dict, got 1.5"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_any_is_started(llm: LLM, name: str) -> None:
    prompts, message = BAD_PROMPTS[name]
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts)
    if isinstance(prompts, list):
        with pytest.raises(ValueError, match=message):
            llm.generate([[5, 6, 7], *prompts])
    assert not llm.engine.has_work
    llm.engine.scheduler.check_integrity()
    assert len(llm.generate([5, 6, 7], greedy(3))[0].outputs[0].token_ids) == 3


BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "logit_bias beyond the vocabulary": ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: token id 256 is outside"),
    "allowed beyond the vocabulary": ({"allowed_token_ids": [300]}, "allowed_token_ids: token id 300 is outside"),
    "stop id beyond the vocabulary": ({"stop_token_ids": [999]}, "stop_token_ids: token id 999 is outside"),
    "too many stop ids": ({"stop_token_ids": list(range(65))}, "65 stop token ids, .* at most 64"),
    "too many logprobs": ({"logprobs": 21}, "logprobs=21 exceeds max_logprobs=20"),
    "all logprobs": ({"prompt_logprobs": -1}, "prompt_logprobs=-1 exceeds max_logprobs=20"),
    "stop strings without a tokenizer": ({"stop": "x"}, "stop strings need a tokenizer"),
    "bad words without a tokenizer": ({"bad_words": ["x"]}, "bad_words need a tokenizer"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_parameters_this_model_cannot_serve_are_refused(llm: LLM, name: str) -> None:
    fields, message = BAD_PARAMS[name]
    with pytest.raises(ValueError, match=message):
        llm.generate([5, 6], SamplingParams(**fields))
    assert not llm.engine.has_work


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "min above max": ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) must not exceed max_tokens \(4\)"),
    "stop without text": ({"stop": "x", "detokenize": False}, "stop strings need detokenize"),
    "greedy samples": ({"temperature": 0, "n": 2}, "n > 1 with temperature 0"),
    "nothing allowed": ({"allowed_token_ids": []}, r"must be a list \(not empty\), each .* or None, got \[\]"),
    "no tokens": ({"max_tokens": 0}, "max_tokens must be an integer from 1 to 2147483647 or None, got 0"),
    "bias by text": ({"logit_bias": {"5": 1.0}}, "logit_bias must be a dict, each key an integer from 0 to"),
    "infinite bias": ({"logit_bias": {5: float("-inf")}},
                      r"logit_bias must be .* each value a number that is finite \(-1e9 forbids a token, 1e9 forces"),
    "bias of text": ({"logit_bias": {5: "x"}}, "logit_bias must be .* each value a number"),
    "cold": ({"temperature": -1}, r"temperature must be a number from 0 to 1e\+30, got -1"),
    "infinite": ({"temperature": float("inf")}, "temperature must be a number from 0 to .*, got inf"),
    "unknown field": ({"temprature": 1}, "unknown field 'temprature': did you mean temperature\\? Known are"),
    "refused field": ({"best_of": 2}, "best_of is not supported: use n"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_named(name: str) -> None:
    fields, message = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("priority", ["high", [0, "high"]])
def test_a_refused_priority_leaves_nothing_behind(llm: LLM, priority: Any) -> None:
    with pytest.raises(ValueError, match="priority must be an integer from .*, got 'high'"):
        llm.generate([[5, 6], [5, 6]], greedy(3), priority=priority)
    assert not llm.engine.has_work
    llm.engine.scheduler.check_integrity()


def test_messages_that_are_none_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="messages must be a list of dicts, or a list of such lists, got 5"):
        llm.chat(5)  # type: ignore[arg-type]


def test_a_list_of_parameters_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate([[5, 6]], [SamplingParams(), SamplingParams()])


def test_a_request_id_in_use_is_refused() -> None:
    with Rig(tiny_model("llama")) as rig:
        add_request(rig.engine, "a", [5, 6], greedy(4))
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            add_request(rig.engine, "a", [5, 6], greedy(4))
        while rig.engine.has_work:
            rig.engine.step()
        rig.assert_clean()


# Models and settings

def test_unknown_settings_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown setting 'max_model_length': did you mean max_model_len\\? Known are"):
        LLM(str(folder), max_model_length=64)


def test_unknown_architectures_say_where_the_known_are_listed(folder: Path, tmp_path: Path) -> None:
    odd = copy_with(folder, tmp_path / "odd", architectures=["FooForCausalLM"])
    with pytest.raises(ValueError, match="FooForCausalLM.*`outrider models` lists what can be served"):
        LLM(str(odd), **SMALL)


def test_truncated_weights_are_refused_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    broken = copy_with(folder, tmp_path / "broken")
    data = (broken / "model.safetensors").read_bytes()
    for keep in (4, 100, len(data) // 2, len(data) - 1):
        (broken / "model.safetensors").write_bytes(data[:keep])
        with pytest.raises(ValueError, match="model.safetensors is truncated or damaged.*download it again"):
            LLM(str(broken), **SMALL)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(folder: Path, tmp_path: Path, value: float) -> None:
    bad = copy_with(folder, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight holds NaN or Inf"):
        LLM(str(bad), **SMALL)


def test_a_pool_too_small_for_one_request_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="3 pages, enough for one request of 48 tokens.*lower max_model_len to 48"):
        LLM(str(folder), **SMALL | {"num_pages": 4})
    with pytest.raises(ValueError, match="num_pages must be at least 2|too few for one token"):
        LLM(str(folder), **SMALL | {"num_pages": 1})


def test_an_automatic_length_is_lowered_to_what_the_pool_holds(folder: Path) -> None:
    with LLM(str(folder), **SMALL | {"num_pages": 4, "max_model_len": None}) as llm:
        assert llm.engine.limits.max_len == 48
        (output,) = llm.generate([[5] * 20], greedy(None))
        assert len(output.outputs[0].token_ids) <= 28
        with pytest.raises(ValueError, match="max_model_len is 48"):
            llm.generate([[5] * 48])


def test_too_long_for_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len \(512\) exceeds the 256 positions"):
        LLM(str(folder), **SMALL | {"max_model_len": 512})


def test_a_budget_below_the_requests_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(2\) must be at least max_num_seqs \(4\)"):
        LLM(str(folder), **SMALL | {"max_num_batched_tokens": 2})


# While running

CURSED = 7


def cursed_model(config: dict[str, Any] = LLAMA) -> Model:
    """Whatever follows token 7 is NaN. The head has weights of its own, so nobody else meets them."""
    model = random_model(config, torch.float64, seed=3)
    model.embed_tokens.weight[CURSED] = torch.nan
    return model


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("family", ["llama", "sliding"])
def test_nan_ends_its_own_request_only(family: str, overlap: bool) -> None:
    """In a prompt, and on the way when the request itself picks the token. Its pages serve others afterwards."""
    model = cursed_model(CONFIGS[family])
    never = {CURSED: -100.0}
    asks = [
        Ask([5, CURSED, 9], greedy(6)),
        Ask(prompt_of(1, 20), greedy(8, logit_bias=never)),
        Ask(prompt_of(2, 5), greedy(8, allowed_token_ids=[CURSED])),
        Ask(prompt_of(3, 9), SamplingParams(seed=1, max_tokens=8, logit_bias=never)),
    ]
    settings = {"num_pages": 13, "max_num_batched_tokens": 16, "overlap": overlap}
    with Rig(model, **settings) as rig, Rig(model, **settings) as healthy:
        outputs = rig.run(asks)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["error", "length", "error", "length"]
        assert outputs[0].outputs[0].token_ids == [] and outputs[2].outputs[0].token_ids == [CURSED]
        assert all("not finite" in (outputs[i].outputs[0].error or "") for i in (0, 2))
        assert outputs[1].outputs[0].error is None
        alone = healthy.run([asks[1], asks[3]])
        again = rig.run([asks[1], asks[3]])
        for first, second, third in zip([outputs[1], outputs[3]], alone, again, strict=True):
            assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids


def test_nothing_left_to_choose_ends_the_request() -> None:
    """The only token allowed ends the text, and the text may not end yet."""
    impossible = greedy(6, allowed_token_ids=[CURSED], stop_token_ids=[CURSED], min_tokens=2)
    mate = Ask(prompt_of(1, 20), greedy(8))
    with Rig(tiny_model("llama")) as rig:
        bad, good = rig.run([Ask([5, 6], impossible), mate])
        assert bad.outputs[0].finish_reason == "error" and "no token is allowed" in (bad.outputs[0].error or "")
        assert good.outputs[0].token_ids == rig.run([mate])[0].outputs[0].token_ids


def test_one_sample_may_fail_beside_its_siblings() -> None:
    model = cursed_model()
    params = SamplingParams(n=6, seed=1, max_tokens=12, temperature=1.5, allowed_token_ids=[CURSED, *range(20, 40)])
    with Rig(model, max_num_seqs=6) as rig:
        (output,) = rig.run([Ask([5, 6], params)])
    failed = [sample for sample in output.outputs if sample.finish_reason == "error"]
    assert 0 < len(failed) < 6
    for sample in output.outputs:
        if sample in failed:
            assert sample.token_ids[-1] == CURSED
        else:
            assert sample.finish_reason == "length" and CURSED not in sample.token_ids[:-1]


class Interrupt(BaseException):
    """As a key press would be: not an Exception."""


@pytest.mark.parametrize("error", [Interrupt, RuntimeError])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("when", [1, 2, 5])
def test_an_interrupted_generate_leaves_the_engine_clean(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: int, overlap: bool, error: type[BaseException]
) -> None:
    with LLM(str(folder), **SMALL, overlap=overlap, max_num_batched_tokens=16) as llm:
        prompts = [prompt_of(i, 20) for i in range(6)]
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(8))]
        calls = 0
        update = llm.engine.scheduler.update

        def interrupted(result: Any, seconds: float | None) -> Any:
            nonlocal calls
            calls += 1
            if calls == when:
                update(result, seconds)
                raise error()
            return update(result, seconds)

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, "update", interrupted)
            with pytest.raises(error):
                llm.generate(prompts, greedy(8))
        assert not llm.engine.has_work and not llm.engine.scheduler.has_work
        llm.engine.scheduler.check_integrity()
        assert llm.engine.scheduler.cache.usage() == 0
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(8))] == expected


def test_an_interrupt_while_a_result_is_awaited_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    with LLM(str(folder), **SMALL) as llm:
        prompt = prompt_of(1, 20)
        expected = llm.generate(prompt, greedy(8))[0].outputs[0].token_ids
        result = Future.result
        waits = iter(range(100))

        def wait(self: Future[Any], timeout: float | None = None) -> Any:
            if next(waits) == 3:
                raise KeyboardInterrupt
            return result(self, timeout)

        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", wait)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompt, greedy(8))
        assert not llm.engine.has_work and not llm.engine.scheduler.has_work
        llm.engine.scheduler.check_integrity()
        assert llm.generate(prompt, greedy(8))[0].outputs[0].token_ids == expected
