"""Structured output: the text has its form, and its tokens do not depend on drafts, chunks, hits, overlap, padding,
preemptions or batch mates. In float64, where any difference is a bug; a token of the tiny models is a byte."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.core import StepForm
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams
from outrider.features.grammars import compiled_forms, limits
from outrider.features.grammars.compiled_forms import CompiledForms
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.captured import AsCaptured
from tests.engine.harness import (
    CONFIGS,
    Ask,
    Rig,
    add_request,
    byte_tokenizer,
    greedy,
    prompt_of,
    random_model,
    tiny_model,
    tokens_of,
)
from tests.engine.local_compiler import LocalCompiler
from tests.engine.recurrent_rig import HYBRIDS

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

END = 2  # an end token that is no part of any form here
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{2,5}$"}, "count": {"type": "integer", "minimum": 0,
                   "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["name", "count", "ok"], "additionalProperties": False,
}
CHOICES = ["red", "green", "green tea", "blue"]
SHARED = prompt_of(0, 32)


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


ASKS = [
    Ask([*SHARED, *prompt_of(1, 9)], greedy(60, structured_outputs=form(json=SCHEMA))),
    Ask([*SHARED, *prompt_of(2, 7)], SamplingParams(temperature=1.0, seed=5, max_tokens=60, top_p=0.9,
                                                    structured_outputs=form(json=SCHEMA))),
    Ask(prompt_of(3, 5), greedy(20, structured_outputs=form(choice=CHOICES), repetition_penalty=1.2)),
    Ask(prompt_of(4, 11), SamplingParams(temperature=1.3, seed=8, max_tokens=24, structured_outputs=form(
        grammar='start: item ("," item){1,3}\nitem: "<" /[0-9]{1,3}/ ">"'), logit_bias={ord("7"): 2.0})),
    Ask(prompt_of(5, 6), greedy(9)),
    Ask(prompt_of(6, 6), SamplingParams(temperature=0.8, seed=3, max_tokens=9, logprobs=2)),
]
WITH_FORM = range(4)
SETTINGS: dict[str, Any] = {"eos_ids": (END,), "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 64}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "auto": False}
AUTO = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def rig_of(**settings: Any) -> Rig:
    return Rig(tiny_model("llama"), tokenizer=byte_tokenizer(), **(SETTINGS | settings))


@functools.cache
def expected() -> list[list[list[int]]]:
    """Each request alone, in one chunk, without drafts."""
    with rig_of(enable_prefix_caching=False, overlap=False) as rig:
        return tokens_of(rig.run_one_by_one(ASKS))


def test_texts_have_their_form() -> None:
    texts = [bytes(samples[0][:-1]).decode() for samples in expected()[: len(WITH_FORM)]]
    assert all(samples[0][-1] == END for samples in expected()[: len(WITH_FORM)]), "the end of the form ends the text"
    for text in texts[:2]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert texts[2] in CHOICES
    assert re.fullmatch(r"<\d{1,3}>(,<\d{1,3}>){1,3}", texts[3])
    assert texts[0] != texts[1]


def scripted(k: int, errors: set[int]) -> ScriptedDrafter:
    """Drafts the right text, wrong at some places. A wrong byte is one that no form allows."""
    lines = {tuple(ask.prompt): [1 if i in errors else token for i, token in enumerate(samples[0])]
             for ask, samples in zip(ASKS, expected(), strict=True)}
    return ScriptedDrafter(k, lambda prompt, sample: lines[prompt], lambda position: position % (k + 1))


DRAFTS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {},
    "ngram": lambda: {"speculative_config": NGRAM},
    "auto": lambda: {"speculative_config": AUTO},
    "scripted": lambda: {"drafter": scripted(4, {3, 4, 9, 17, 30})},
}
CELLS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "overlapped": {"overlap": True},
    "three in flight, small chunks": {"depth": 3, "max_num_batched_tokens": 7},
    "padded": {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)},
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_tokens_do_not_depend_on_the_engine(drafts: str, cell: str) -> None:
    with rig_of(**DRAFTS[drafts](), **CELLS[cell]) as rig:
        outputs = rig.run(ASKS)
        assert tokens_of(outputs) == expected()
        if cell == "padded":
            assert rig.runner.num_padded_steps > 0
        accepted = sum(outputs[i].metrics.num_accepted_tokens for i in WITH_FORM)
        assert (accepted > 0) == (drafts != "none")
        if cell == "overlapped":
            outputs = rig.run(ASKS[:3])
            assert tokens_of(outputs) == expected()[:3]
            assert outputs[0].metrics.num_cached_tokens > 0


@pytest.mark.parametrize("drafts", ["none", "scripted", "ngram"])
def test_a_preempted_request_goes_on_from_its_tokens(drafts: str) -> None:
    with rig_of(**DRAFTS[drafts](), overlap=True) as rig:
        outputs = rig.run(ASKS, after_step=rig.preempt)
        assert tokens_of(outputs) == expected()
        assert all(outputs[i].metrics.num_preemptions for i in (0, 1))


@pytest.mark.parametrize("family", ["gemma3", "gated_delta"])
def test_other_kinds_of_layers(family: str) -> None:
    """Sliding windows and recurrent states, of which rejected drafts must leave nothing."""
    model = random_model((CONFIGS | HYBRIDS)[family], torch.float64, 3)
    found = []
    for settings in ({"overlap": False}, {"speculative_config": NGRAM, "overlap": True}):
        with Rig(model, tokenizer=byte_tokenizer(), **(SETTINGS | settings)) as rig:
            outputs = rig.run(ASKS, after_step=rig.preempt if settings["overlap"] else None)
            found.append(tokens_of(outputs))
    assert found[0] == found[1]
    assert outputs[0].metrics.num_accepted_tokens > 0 and outputs[0].metrics.num_preemptions > 0
    jsonschema.validate(json.loads(bytes(found[0][0][0][:-1])), SCHEMA)


@pytest.mark.parametrize("drafts", ["none", "scripted", "ngram"])
def test_captured_halves_give_the_same_tokens(drafts: str) -> None:
    """As a GPU runs them: drafts of the next step are guessed before the run of this one is known."""
    with rig_of(**DRAFTS[drafts](), overlap=True) as rig:
        own = rig.step.host_turn
        captured = AsCaptured(rig, form=StepForm.SPLIT)
        rig.step.host_turn, rig.step.turns.runs_ahead = own, True  # type: ignore[method-assign]
        outputs = rig.run(ASKS[:4])
        assert tokens_of(outputs) == expected()[:4]
        assert captured.reasons
        if drafts == "ngram":
            assert outputs[0].metrics.num_accepted_tokens > len(expected()[0][0]) // 3, "forced tokens were drafts"


def test_steps_are_split_only_where_a_grammar_samples() -> None:
    with rig_of(max_num_batched_tokens=16, enable_prefix_caching=False) as rig:
        assert tokens_of(rig.run(ASKS[4:])) == expected()[4:]
        assert {batch.mode.form for batch in rig.batches} == {StepForm.WHOLE}
        rig.batches.clear()
        assert tokens_of(rig.run([ASKS[0], ASKS[4]])) == [expected()[0], expected()[4]]
        forms = [batch.mode.form for batch in rig.batches]
        assert forms[0] is StepForm.WHOLE, "of a prompt in chunks only the last one samples"
        assert forms[-1] is StepForm.SPLIT
        rig.batches.clear()
        assert tokens_of(rig.run(ASKS[5:])) == expected()[5:]
        assert {batch.mode.form for batch in rig.batches} == {StepForm.WHOLE}, "after the last grammar has ended"


def test_a_text_that_has_all_of_its_form_ends_beside_a_mate_with_min_tokens() -> None:
    """The sampler forbids the mate to stop; the text of a form ends however short it is."""
    short = Ask(prompt_of(3, 5), greedy(20, structured_outputs=form(choice=["red"]), min_tokens=12))
    mate = Ask(prompt_of(5, 6), greedy(9, min_tokens=9))
    with rig_of() as rig:
        (alone,), (_,) = tokens_of(rig.run_one_by_one([short, mate]))
        assert alone == [*b"red", END]
        assert tokens_of(rig.run([short, mate]))[0] == [alone]


def test_forced_tokens_are_drafts() -> None:
    """Keys and punctuation are the grammar's: with drafts, most tokens of the text come several in a step."""
    with rig_of(speculative_config=NGRAM, overlap=False) as rig:
        (output,) = rig.run([ASKS[0]])
        metrics = output.metrics
        assert len(output.outputs[0].token_ids) / metrics.num_steps > 1.5
        assert metrics.num_accepted_tokens > 0.8 * metrics.num_draft_tokens
    ask = Ask(ASKS[0].prompt, greedy(60, structured_outputs=form(json=SCHEMA), speculative=False))
    with rig_of(speculative_config=NGRAM, overlap=False) as rig:
        (output,) = rig.run([ask])
        assert tokens_of([output]) == expected()[:1] and output.metrics.num_draft_tokens == 0


def test_a_draft_that_the_grammar_forbids_is_never_accepted() -> None:
    """Not even where the model would choose it: here the drafts are the free text of the same prompt."""
    free = Ask(ASKS[0].prompt, greedy(40))
    with rig_of() as rig:
        ((text,),) = tokens_of(rig.run([free]))
    drafter = ScriptedDrafter(4, lambda prompt, sample: text)
    with rig_of(drafter=drafter) as rig:
        assert tokens_of(rig.run([ASKS[0]])) == expected()[:1]


def test_drafts_beyond_the_tokenizer_change_nothing() -> None:
    """A model's vocabulary may be padded; a grammar library need not know such ids."""
    model = random_model(CONFIGS["llama"] | {"vocab_size": 300}, torch.float64, 4)
    found = []
    for drafter in (None, ScriptedDrafter(3, lambda prompt, sample: [299, 298, 299, 290] * 20)):
        with Rig(model, tokenizer=byte_tokenizer(), drafter=drafter, **SETTINGS) as rig:
            found.append(tokens_of(rig.run(ASKS[:2])))
    assert found[0] == found[1]


@pytest.mark.parametrize("drafts", ["none", "scripted"])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [({"min_tokens": 5}, r"a{5,8}"), ({"ignore_eos": True}, r"a{8}"), ({"min_tokens": 20}, r"a{8}"),
     ({"stop": ["aaa"], "include_stop_str_in_output": True}, "aaa")],
)
def test_a_complete_form_ends_the_text_whatever_the_minimum(fields: dict[str, Any], pattern: str,
                                                            drafts: str) -> None:
    # The end token is what the model would choose at once.
    params = greedy(30, structured_outputs=form(regex="a{1,8}"), logit_bias={END: 100.0}, **fields)
    if "stop" in fields:
        params = greedy(30, structured_outputs=form(regex="a{1,8}"), logit_bias={END: -100.0}, **fields)
    with rig_of(**(DRAFTS[drafts]() if drafts == "none" else {"speculative_config": NGRAM})) as rig:
        (output,) = rig.run([Ask(prompt_of(9, 4), params)])
    assert output.outputs[0].finish_reason == "stop"
    assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0].text


def test_where_nothing_is_allowed_the_request_ends_and_its_mates_go_on() -> None:
    dead = greedy(20, structured_outputs=form(regex="[0-9]{4}x"), allowed_token_ids=[ord("1"), ord("2")])
    with rig_of() as rig:
        outputs = rig.run([Ask(prompt_of(9, 4), dead), ASKS[0], ASKS[4]])
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "structured_outputs" in (outputs[0].outputs[0].error or "")
        assert tokens_of(outputs[1:]) == [expected()[0], expected()[4]]


def test_a_grammar_beyond_its_limits_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To follow this form takes a state for each of the possible last twelve letters."""
    alone = expected()[4]  # under the ordinary limits
    monkeypatch.setattr(limits, "MAX_LEXER_STATES", 30)
    many_states = form(regex="(a|b)*a(a|b){12}c")
    with rig_of() as rig:
        outputs = rig.run([Ask(prompt_of(9, 4), SamplingParams(temperature=2.0, seed=1, max_tokens=60,
                                                               structured_outputs=many_states)), ASKS[4]])
        assert outputs[0].outputs[0].finish_reason == "error"
        assert re.search("structured_outputs: the grammar allows no further token .*too many states: 30 >= 30[)]",
                         outputs[0].outputs[0].error or "")
        assert tokens_of(outputs[1:]) == [alone]


BAD = {
    "schema type": (form(json={"properties": {"a": {"items": {"type": "objec"}}}}),
                    r"json\['properties'\]\['a'\]\['items'\] cannot be compiled: .*objec"),
    "unsupported keyword": (form(json={"not": {}}), r"json cannot be compiled: .*not"),
    "pattern": (form(json={"type": "string", "pattern": "("}), "json cannot be compiled: .*unclosed group"),
    "no JSON": (form(json="{"), "structured_outputs.json is not valid JSON: .*line 1"),
    "no object": (form(json="[1]"), "must be a schema"),
    "regex": (form(regex="(a"), "structured_outputs.regex cannot be compiled: .*unclosed group"),
    "grammar": (form(grammar="start: nothing"), "structured_outputs.grammar cannot be compiled: .*nothing"),
    "GBNF": (form(grammar='root ::= ("a"'), "structured_outputs.grammar cannot be read"),
    "long GBNF": (form(grammar="\n".join(f"a{i} ::= a{i + 1}" for i in range(900))), "GBNF grammar has at most 8192"),
    "no text": (form(grammar="start: start"), "no text has this form"),
    "endless": (form(json={"$ref": "#"}), "no text has this form"),
    "huge": (form(json={"enum": ["x" * 300_000]}), "has 300014 bytes, and at most 262144"),
    "huge choices": (form(choice=["x" * 100] * 3000), "has 300000 bytes"),
    "deep": (form(json=functools.reduce(lambda inner, _: {"items": inner}, range(300), {})), "nested more than 100"),
}


def test_what_cannot_be_compiled_is_refused_by_place() -> None:
    with rig_of() as rig:
        for asked, message in BAD.values():
            with pytest.raises(ValueError, match=message):
                add_request(rig.engine, "bad", [5], greedy(4, structured_outputs=asked))
        assert not rig.engine.has_work
        assert tokens_of(rig.run(ASKS[:1])) == expected()[:1]


def test_thousands_of_nested_rules_are_compiled_or_refused() -> None:
    """On an ordinary stack such grammars end the process."""
    chain = "\n".join(f"a{i}: a{i + 1}" for i in range(9000))
    nested = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(2000)}
    many = {"$ref": "#/$defs/a0", "$defs": nested | {"a2000": {"type": "string"}}}
    with rig_of() as rig:
        rig.engine.checks.check([5], greedy(4, structured_outputs=form(grammar=f'start: a0\n{chain}\na9000: "x"')))
        rig.engine.checks.check([5], greedy(4, structured_outputs=form(json=many)))


def test_compiling_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast or slow the machine is: a grammar is not compiled before the limit has passed."""
    has_failed, compile_one = threading.Event(), CompiledForms._compile

    def wait_and_compile(own: CompiledForms, text: str) -> tuple[Any, str]:
        has_failed.wait()
        return compile_one(own, text)

    monkeypatch.setattr(limits, "COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(CompiledForms, "_compile", wait_and_compile)
    with rig_of() as rig:
        with pytest.raises(ValueError, match=r"takes longer than 0.01 seconds to compile"):
            rig.engine.checks.check([5], greedy(4, structured_outputs=form(regex="a+")))
        has_failed.set()


def test_the_tokenizer_is_prepared_before_a_grammars_time_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may take longer than any grammar may, and no simpler grammar would help."""
    given: list[float] = []
    prepared_within: list[float] = []
    read = CompiledForms._read_tokenizer

    def run(work: Callable[[], Any], seconds: float) -> Any:
        given.append(seconds)
        return work()

    def noted(own: CompiledForms) -> Any:
        if own._tokenizer is None:
            prepared_within.append(given[-1])
        return read(own)

    monkeypatch.setattr("outrider.core.deep_thread.run_deep", run)
    monkeypatch.setattr(CompiledForms, "_read_tokenizer", noted)
    monkeypatch.setattr(compiled_forms, "NUM_COMPILING", 1)
    own = LocalCompiler(byte_tokenizer, (END,))
    for regex in ("a+", "b+"):
        own.check(form(regex=regex).to_plain())
    assert prepared_within == [limits.VOCABULARY_SECONDS]
    assert given == [limits.VOCABULARY_SECONDS, limits.COMPILE_SECONDS, limits.COMPILE_SECONDS]


@pytest.mark.parametrize(
    ("fields", "message"),
    [({}, "must be exactly one of json, .* got none"), ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
     ({"regx": "a"}, "did you mean regex"), ({"structural_tag": 3}, "structured_outputs.structural_tag must be"),
     ({"choice": []}, "structured_outputs.choice must be"), ({"regex": 3}, "structured_outputs.regex must be"),
     ({"regex": "a", "whitespace_pattern": " "}, "are for JSON")],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**fields)


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
OLD_TAG = {"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
                          {"begin": "[g]", "schema": {"type": "boolean"}, "end": "[/g]"},
                          {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"}], "triggers": ["<f", "[g"]}


def tag(name: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": f"<{name}>", "content": content, "end": f"</{name}>"}


TRIGGERED = {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag("a", NUMBER)]}


@pytest.mark.parametrize(("given", "right", "wrong"), [
    (OLD_TAG, ["", "hi < f", "a <f=a>1</f> [g]true[/g] b <f=b>null</f>", "x [g]true[/g]<f=a>2</f> y"],
     ["[g]1", "x<f=c>", "a<f=a>1", "a<f=a>1</f><f"]),
    ({"format": {"type": "sequence", "elements": [tag("t", {"type": "any_text"}), {"type": "or", "elements": [
        {"type": "const_string", "value": "no"}, NUMBER, {"type": "regex", "pattern": "a/b+"},
        {"type": "grammar", "grammar": 'root ::= "z" "y"'}]}]}},
     ["<t>x <</t>no", "<t></t>5", "<t></t>a/bb", "<t></t>zy"], ["5", "<t>x</t>q", "<t>x</t>"]),
    ({"format": {"type": "tags_with_separator", "separator": ",", "at_least_one": True, "tags": [tag("a", NUMBER)]}},
     ["<a>1</a>", "<a>1</a>,<a>2</a>"], ["", "<a>1</a><a>2</a>", "x"]),
    ({"format": TRIGGERED | {"at_least_one": True}}, ["x<a>1</a>", "<a>1</a> y"], ["", "x"]),
    ({"format": TRIGGERED | {"stop_after_first": True}}, ["x<a>1</a>", "x"], ["<a>1</a> y"]),
])
def test_structural_tags(given: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    compiler = LocalCompiler(byte_tokenizer, (END,))
    for asked in (form(structural_tag=given), form(structural_tag=json.dumps(given))):
        lease = compiler.check(asked.to_plain())
        for text in [*right, *wrong]:
            matcher = compiler.forms.start(lease.number).result()
            matcher.advance(list(text.encode()))
            assert (matcher.error is None and matcher.inner.is_accepting()) == (text in right), text


@pytest.mark.parametrize(("given", "words"), [
    ("no JSON", "is not valid JSON"), ("[]", "must be a structural tag: a JSON object"),
    ({}, "needs the field 'format', which is an object"),
    ({"format": {"type": "poem"}}, "'poem' is not supported; supported: const_string"),
    ({"structures": [], "triggers": []}, "a list that is not empty"),
    ({"structures": [{"begin": "a", "end": "b"}], "triggers": ["c"]}, "no tag begins with the trigger 'c'"),
    ({"format": {"type": "sequence", "elements": [3]}}, "needs the field 'type', which is a string"),
    ({"format": {"type": "const_string"}}, "of type 'const_string' needs the field 'value', which is a string"),
    ({"format": {"type": "triggered_tags", "triggers": [3], "tags": [tag("a", NUMBER)]}}, "triggers must be texts"),
])
def test_structural_tags_that_are_none(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs.structural_tag.*{words}"):
        LocalCompiler(byte_tokenizer, (END,)).check(form(structural_tag=given).to_plain())


def test_structural_tags_with_and_without_drafts() -> None:
    given = {"format": {"type": "sequence", "elements": [tag("t", {"type": "regex", "pattern": "[a-c]{9}"}), NUMBER]}}
    ask = Ask(prompt_of(3, 8), greedy(40, structured_outputs=form(structural_tag=given)))
    with rig_of() as rig, rig_of(speculative_config=NGRAM) as drafting:
        (plain,), (drafted,) = rig.run([ask]), drafting.run([ask])
    assert tokens_of([plain]) == tokens_of([drafted]) and drafted.metrics.num_accepted_tokens > 0
    assert re.match(r"<t>[a-c]{9}</t>-?\d", bytes(plain.outputs[0].token_ids).decode())


def test_models_without_a_tokenizer_or_an_end_are_refused() -> None:
    asked = greedy(4, structured_outputs=form(regex="a"))
    with Rig(tiny_model("llama")) as rig, pytest.raises(ValueError, match="need a tokenizer"):
        add_request(rig.engine, "0", [5], asked)
    with Rig(tiny_model("llama"), tokenizer=byte_tokenizer()) as rig, pytest.raises(ValueError, match="no end token"):
        add_request(rig.engine, "0", [5], asked)


def test_white_space_is_what_the_request_says() -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "minItems": 3, "maxItems": 3}
    spaces: dict[str, dict[str, Any]] = {
        r"\[\d, \d, \d\]": {}, r"\[\d,\d,\d\]": {"disable_any_whitespace": True},
        r"\[\n{0,2}\d\n{0,2},\n{0,2}\d\n{0,2},\n{0,2}\d\n{0,2}\]\n*": {"whitespace_pattern": r"\n{1,2}"},
    }
    with rig_of() as rig:
        for pattern, fields in spaces.items():
            params = greedy(40, structured_outputs=form(json=schema, **fields), logit_bias={ord("\n"): 50.0})
            (output,) = rig.run([Ask(prompt_of(1, 4), params)])
            assert re.fullmatch(pattern, output.outputs[0].text), (output.outputs[0].text, fields)
