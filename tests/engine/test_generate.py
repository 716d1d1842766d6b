"""What a caller of LLM sees: text, stops, samples, lengths, streams, priorities. Equal whatever the runs were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.detokenize import Detokenizer
from tests.engine.harness import (
    CONFIGS,
    Ask,
    Rig,
    add_request,
    byte_tokenizer,
    greedy,
    prompt_of,
    save_folder,
    tiny_model,
    tokens_of,
)

END = 257  # the end of a text
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "num_pages": 64}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes, and that seldom ends by itself."""
    config = CONFIGS["llama"] | {"vocab_size": 259, "eos_token_id": END}
    path = save_folder(tmp_path_factory.mktemp("models") / "bytes", config, seed=5)
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


ASCII = list(range(97, 123))
# Letters only, so that the text is easy to look at.
LETTERS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "allowed_token_ids": ASCII}


def text_of(llm: LLM, prompt: str = "hello", **fields: Any) -> Any:
    (output,) = llm.generate(prompt, SamplingParams(**LETTERS | fields))
    return output.outputs[0]


def test_text_is_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("hello", greedy(20, allowed_token_ids=list(range(256))))
    sample = output.outputs[0]
    assert output.prompt == "hello" and output.prompt_token_ids == list(b"hello")
    tokenizer = llm.get_tokenizer()
    assert sample.text == tokenizer.decode(sample.token_ids) == bytes(sample.token_ids).decode(errors="replace")
    assert sample.finish_reason == "length" and len(sample.token_ids) == 20
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time  # type: ignore[operator]


def test_prompts_come_in_every_form_and_outputs_in_their_order(llm: LLM) -> None:
    texts = [f"prompt {i}" for i in range(9)]
    forms: list[Any] = [texts[0], list(texts[1].encode()), {"prompt": texts[2]},
                        {"prompt_token_ids": list(texts[3].encode())}, *texts[4:]]
    together = llm.generate(forms, greedy(6))
    assert [bytes(output.prompt_token_ids).decode() for output in together] == texts
    for text, output in zip(texts, together, strict=True):
        assert output.outputs[0].token_ids == llm.generate(text, greedy(6))[0].outputs[0].token_ids
    assert llm.generate([]) == []
    assert llm.generate(list(b"hello"), greedy(4))[0].prompt_token_ids == list(b"hello")


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short, long = llm.generate(["a", "a"], [greedy(2), greedy(5)])
    assert [len(o.outputs[0].token_ids) for o in (short, long)] == [2, 5]


def test_each_prompt_may_have_its_own_priority(folder: Path) -> None:
    """Who matters most is served first; the others wait in their order."""
    with LLM(str(folder), **SETTINGS | {"max_num_seqs": 1}) as llm:
        outputs = llm.generate(["a", "b", "c", "d"], greedy(3), priority=[2, 1, 1, -5])
        ends = [output.metrics.finished_time or 0.0 for output in outputs]
        assert sorted(range(4), key=lambda i: ends[i]) == [3, 1, 2, 0]
        assert len(llm.generate(["a", "b"], greedy(2), priority=7)) == 2
        with pytest.raises(ValueError, match="1 priority for 2 prompts"):
            llm.generate(["a", "b"], priority=[1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_where_it_begins(llm: LLM, include: bool) -> None:
    whole = text_of(llm)
    for start in (1, 7, 15):
        stop = whole.text[start : start + 3]
        found = whole.text.index(stop)
        sample = text_of(llm, stop=["@@", stop], include_stop_str_in_output=include)
        assert sample.text == whole.text[: found + 3 if include else found]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.token_ids == whole.token_ids[: found + 3], "tokens up to the one that showed it"
    assert not llm.engine.has_work, "the device learns late that it ended, and the call waits for that"
    llm.engine.scheduler.check_integrity()


def test_text_that_might_begin_a_stop_string_comes_out_in_the_end(llm: LLM) -> None:
    whole = text_of(llm)
    sample = text_of(llm, stop=whole.text[-2:] + "@")
    assert sample.text == whole.text and sample.finish_reason == "length"


def test_stop_token_ids_end_the_text_and_stay_in_the_tokens(llm: LLM) -> None:
    whole = text_of(llm)
    at = 9
    first = whole.token_ids.index(whole.token_ids[at])
    sample = text_of(llm, stop_token_ids=[whole.token_ids[at]])
    assert sample.token_ids == whole.token_ids[: first + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", whole.token_ids[at])
    assert sample.text == whole.text[:first], "and out of the text"
    shown = text_of(llm, stop_token_ids=[whole.token_ids[at]], include_stop_str_in_output=True)
    assert shown.text == whole.text[: first + 1]


def test_the_end_of_text_is_obeyed_or_ignored(llm: LLM) -> None:
    often = {"allowed_token_ids": [*ASCII[:4], END], "max_tokens": 40, "seed": 1}
    ended, ignored = text_of(llm, **often), text_of(llm, **often, ignore_eos=True)
    assert ended.token_ids[-1] == END and ended.finish_reason == "stop" and ended.stop_reason is None
    assert ignored.finish_reason == "length" and len(ignored.token_ids) == 40 and END in ignored.token_ids
    assert ignored.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert "<|end|>" not in ignored.text and "<|end|>" in text_of(
        llm, **often, ignore_eos=True, skip_special_tokens=False).text


def test_min_tokens_holds_back_every_end(llm: LLM) -> None:
    often = {"allowed_token_ids": [*ASCII[:2], END], "max_tokens": 40, "seed": 1}
    assert len(text_of(llm, **often).token_ids) < 15
    sample = text_of(llm, **often, min_tokens=15, stop=["a"])
    assert len(sample.token_ids) > 15 and END not in sample.token_ids[:15]
    assert sample.finish_reason == "stop"
    assert set(sample.token_ids[15:-1]) <= {ASCII[1]}, "from then on the first stop ends it"


def test_bad_words_never_appear(llm: LLM) -> None:
    whole = text_of(llm, max_tokens=40)
    words = [whole.text[4:6], whole.text[10]]
    sample = text_of(llm, max_tokens=40, bad_words=words)
    assert sample.text != whole.text and not any(word in sample.text for word in words)


def test_no_max_tokens_runs_to_max_model_len(llm: LLM) -> None:
    sample = text_of(llm, max_tokens=None)
    assert len(sample.token_ids) == 64 - len("hello") and sample.finish_reason == "length"
    longest = llm.generate([[65] * 63], SamplingParams(**LETTERS | {"max_tokens": None}))[0].outputs[0]
    assert len(longest.token_ids) == 1
    assert len(text_of(llm, max_tokens=1000).token_ids) == 64 - len("hello")


def test_without_text_there_are_only_tokens(llm: LLM) -> None:
    sample = text_of(llm, detokenize=False)
    assert sample.text == "" and sample.token_ids == text_of(llm).token_ids


def test_n_samples_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(**LETTERS | {"n": 5})
    first, again = (llm.generate("hello", params)[0] for _ in range(2))
    texts = [sample.text for sample in first.outputs]
    assert [sample.index for sample in first.outputs] == list(range(5)) and len(set(texts)) == 5
    assert texts == [sample.text for sample in again.outputs]
    assert texts[0] == text_of(llm).text, "the first is what n=1 gives"


def test_a_seed_of_minus_one_is_none() -> None:
    """As scripts written for vLLM mean it."""
    assert SamplingParams(seed=-1) == SamplingParams() and SamplingParams(seed=-2).seed == -2


def test_the_seed_is_the_whole_difference(llm: LLM, folder: Path) -> None:
    assert text_of(llm, seed=8).text != text_of(llm, seed=9).text
    with LLM(str(folder), **SETTINGS, seed=5) as other:
        assert text_of(other, seed=8).text == text_of(llm, seed=8).text, "an engine's seed is for requests without one"


def test_requests_without_a_seed_differ_and_say_how_to_repeat_them(llm: LLM) -> None:
    params = SamplingParams(**LETTERS | {"seed": None, "n": 2})
    outputs = llm.generate(["hello"] * 3, params)
    texts = [tuple(sample.text for sample in output.outputs) for output in outputs]
    assert len({text for both in texts for text in both}) == 6 and len({output.seed for output in outputs}) == 3
    for output, both in zip(outputs, texts, strict=True):
        assert output.seed is not None and 0 <= output.seed < 2**53
        (again,) = llm.generate("hello", replace(params, seed=output.seed))
        assert again.seed == output.seed and tuple(sample.text for sample in again.outputs) == both


def test_a_run_of_requests_without_seeds_repeats_with_the_engine(folder: Path) -> None:
    """Whatever was refused on the way; the engine's seed makes another run."""
    unseeded = SamplingParams(**LETTERS | {"seed": None})

    def run(seed: int, *, refuses: bool = False) -> list[str]:
        with LLM(str(folder), **SETTINGS, seed=seed) as engine:
            first = engine.generate(["hello", "hello"], unseeded)
            if refuses:
                for bad in ({"stop_token_ids": [10**6]}, {"logprobs": 1000}):
                    with pytest.raises(ValueError):
                        engine.generate("hello", replace(unseeded, **bad))
                with pytest.raises(ValueError):
                    add_request(engine.engine, "x", [1], unseeded, priority="high")  # type: ignore[arg-type]
            return [output.outputs[0].text for output in first + engine.generate("hello", unseeded)]

    assert run(0) == run(0, refuses=True)
    assert len(set(run(0) + run(1) + run(-7))) == 9


def test_an_engine_with_drafts_gives_the_same_text(llm: LLM, folder: Path) -> None:
    """Stop strings, logprobs and lengths work on runs of any length."""
    tight = {"allowed_token_ids": ASCII[:2], "max_tokens": 40, "logprobs": 1}
    whole = text_of(llm, **tight)
    cases: list[dict[str, Any]] = [{}, {"stop": whole.text[20:24]}, {"min_tokens": 30, "stop": "a"}, {"max_tokens": 17}]
    config = {"method": "ngram", "num_speculative_tokens": 4, "auto": False, "prompt_lookup_min": 1}
    with LLM(str(folder), **SETTINGS, speculative_config=config) as drafting:
        for case in cases:
            plain, drafted = text_of(llm, **tight | case), text_of(drafting, **tight | case)
            assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
            assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason)
            assert [list(entry) for entry in drafted.logprobs] == [list(entry) for entry in plain.logprobs]
        (output,) = drafting.generate("hello", SamplingParams(**LETTERS | tight))
        assert output.metrics.num_accepted_tokens > 0 and output.metrics.mean_run_length > 1


def test_a_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(**LETTERS)
    lengths, text = [], ""
    for output in llm.stream("hello", params):
        lengths.append(len(output.outputs[0].token_ids))
        assert output.outputs[0].text.startswith(text)
        text = output.outputs[0].text
    assert lengths == sorted(lengths) and len(lengths) > 10 and text == text_of(llm).text


def test_a_stream_that_is_left_ends_its_request(llm: LLM) -> None:
    for _ in zip(range(3), llm.stream("hello", SamplingParams(**LETTERS)), strict=False):
        pass
    assert not llm.engine.has_work
    llm.engine.scheduler.check_integrity()


def test_streams_and_generate_interleave(llm: LLM) -> None:
    """Each reader gets its own whole text, though whoever steps the engine steps it for all."""
    params = [SamplingParams(**LETTERS | {"seed": seed, "max_tokens": 12}) for seed in (1, 2, 3)]
    wanted = [llm.generate("hello", p)[0].outputs[0].text for p in params]
    slow, fast = llm.stream("hello", params[0]), llm.stream("hello", params[1])
    next(slow)
    next(fast)
    assert llm.generate("hello", params[2])[0].outputs[0].text == wanted[2]
    assert [output.outputs[0].text for output in fast][-1] == wanted[1]
    assert [output.outputs[0].text for output in slow][-1] == wanted[0]
    left = llm.stream("hello", params[0])
    kept = llm.stream("hello", params[1])
    next(left)
    next(kept)
    left.close()  # type: ignore[attr-defined]
    assert [output.outputs[0].text for output in kept][-1] == wanted[1]
    assert not llm.engine.has_work


def test_chats_go_through_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(chat, greedy(4))
    assert bytes(one.prompt_token_ids) == b"[user]hi>"
    assert [o.outputs[0].token_ids for o in llm.chat([chat, chat], greedy(4))] == [one.outputs[0].token_ids] * 2


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    prompt = "a prompt of more than two pages, for sure"

    def cached(salt: str | None) -> int:
        (output,) = llm.generate({"prompt": prompt, "cache_salt": salt}, greedy(2))
        return output.metrics.num_cached_tokens

    assert [cached(s) for s in ("a", "a", "b", "b", None, None)] == [0, 32, 0, 32, 0, 32]


# Below LLM


def test_priorities_go_first_and_equal_ones_by_arrival() -> None:
    asks = [Ask(prompt_of(i, 8), greedy(4), priority) for i, priority in enumerate([5, 0, 5, -1, 0])]
    with Rig(tiny_model("llama"), max_num_seqs=1) as rig:
        rig.run(asks)
        assert rig.ended == ["3", "1", "4", "0", "2"]


def test_the_least_important_is_preempted() -> None:
    asks = [Ask(prompt_of(i, 20), greedy(30), priority) for i, priority in enumerate([0, 9, 0])]
    with Rig(tiny_model("llama"), max_model_len=64, num_pages=8, max_num_seqs=3, overlap=False) as rig:
        outputs = rig.run(asks)
        preemptions = [output.metrics.num_preemptions for output in outputs]
        assert preemptions[0] == 0 and preemptions[1] > 0


def test_an_abort_keeps_what_there_was() -> None:
    with Rig(tiny_model("llama")) as rig:
        (whole,), = tokens_of(rig.run([Ask(prompt_of(1, 8), greedy(20))]))
        rig.outputs.add("a", prompt_of(1, 8), SamplingParams(temperature=0, max_tokens=20))
        rig.outputs.add("b", prompt_of(2, 8), SamplingParams(n=2, seed=1, max_tokens=20))
        for _ in range(6):
            rig.outputs.step()
        rig.engine.abort("a")
        rig.engine.abort("b")
        rig.engine.abort("nobody")
        ended = {output.request_id: output for output in rig.outputs.step()}
        assert set(ended) == {"a", "b"} and all(output.finished for output in ended.values())
        (sample,) = ended["a"].outputs
        assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 20
        assert sample.token_ids == whole[: len(sample.token_ids)]
        assert [s.finish_reason for s in ended["b"].outputs] == ["abort", "abort"]
        while rig.engine.has_work:
            rig.engine.step()
        rig.assert_clean()


def test_an_output_that_fails_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a tokenizer choke on one request's tokens, its batch mates lose nothing."""
    with Rig(tiny_model("llama"), tokenizer=byte_tokenizer()) as rig:
        asks = [Ask(prompt_of(i, 8), greedy(10)) for i in range(3)]
        expected = tokens_of(rig.run(asks))
        feed = Detokenizer.feed
        odd = next(token for token in expected[1][0] if token not in expected[0][0] + expected[2][0])

        def choke(self: Detokenizer, run: Any) -> Any:
            if odd in run:
                raise RuntimeError("what is this?")
            return feed(self, run)

        monkeypatch.setattr(Detokenizer, "feed", choke)
        first, second, last = rig.run(asks)
        assert second.outputs[0].finish_reason == "error" and "what is this?" in (second.outputs[0].error or "")
        assert tokens_of([first, last]) == [expected[0], expected[2]]
