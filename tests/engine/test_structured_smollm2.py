"""Random JSON schemas on SmolLM2: every answer parses and has its form, and drafts change nothing but the steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from outrider.models.sources.model_source import SourceError
from outrider.models.sources.smollm2 import smollm2_file

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

NAMES = ("name", "age", "city", "price", "tags", "is open", "über", "a\"b", "x1", "description")
Schema = dict[str, Any]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "auto": False}


def numbers(kind: str) -> st.SearchStrategy[Schema]:
    bounds = st.tuples(st.integers(-200, 200), st.integers(0, 900))
    return bounds.map(lambda b: {"type": kind, "minimum": b[0], "maximum": b[0] + b[1]})


LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.integers(0, 5).map(lambda n: {"type": "string", "maxLength": n}),
    st.sampled_from(["^[a-c]{2,4}$", "^(red|blue) [0-9]$"]).map(lambda p: {"type": "string", "pattern": p}),
    st.just({"type": "string", "format": "date"}),
    numbers("integer"), st.just({"type": "boolean"}), st.just({"type": "null"}),
    st.lists(st.sampled_from(["one", 2, None, True, "vier"]), min_size=1, max_size=3, unique_by=str)
    .map(lambda values: {"enum": values}), st.sampled_from(NAMES).map(lambda name: {"const": name}),
)


@st.composite
def objects(draw: st.DrawFn, children: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), children, min_size=1, max_size=2))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def around(children: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    arrays = st.tuples(children, st.integers(0, 2), st.integers(0, 1)).map(
        lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[1] + a[2]})
    either = st.lists(children, min_size=2, max_size=2).map(lambda both: {"anyOf": both})
    return st.one_of(objects(children), arrays, either)


SCHEMAS = objects(st.recursive(LEAVES, around, max_leaves=2))


@pytest.fixture(scope="module")
def llms() -> Any:
    """Without drafts and with them, both exact: a token has the same logits in every batch."""
    try:
        smollm2_file()
    except SourceError as error:
        pytest.skip(str(error))
    common: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 20, "exact": True}
    with LLM("smollm2", **common) as plain, LLM("smollm2", speculative_config=NGRAM, **common) as drafting:
        yield plain, drafting


def answers(llm: LLM, schemas: list[Schema]) -> list[RequestOutput]:
    forms = [StructuredOutputsParams(json=schema) for schema in schemas]
    params = [SamplingParams(temperature=0.7 if i % 2 else 0, seed=i, max_tokens=200, structured_outputs=form)
              for i, form in enumerate(forms)]
    return llm.chat([[{"role": "user", "content": "Describe it."}]] * len(schemas), params)


def check(llms: tuple[LLM, LLM], schemas: list[Schema]) -> None:
    plain, drafted = (answers(llm, schemas) for llm in llms)
    for schema, ours, theirs in zip(schemas, drafted, plain, strict=True):
        (sample,) = ours.outputs
        assert sample.finish_reason == "stop", (schema, sample.text)
        jsonschema.validate(json.loads(sample.text), schema)
        assert sample.token_ids == theirs.outputs[0].token_ids, schema


@given(st.lists(SCHEMAS, min_size=20, max_size=20))
@settings(max_examples=1, suppress_health_check=list(HealthCheck))
def test_random_schemas(llms: tuple[LLM, LLM], schemas: list[Schema]) -> None:
    check(llms, schemas)


@pytest.mark.long
@given(st.lists(SCHEMAS, min_size=20, max_size=20))
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_many_random_schemas(llms: tuple[LLM, LLM], schemas: list[Schema]) -> None:
    check(llms, schemas)


def test_fixed_keys_make_long_runs(llms: tuple[LLM, LLM]) -> None:
    """The tokens of keys are forced, so that they are drafted whatever the text before them was."""
    text, number = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 120}
    fields = {"first_name": text, "family_name": text, "age_in_years": number, "is_employed": {"type": "boolean"}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    (output,) = answers(llms[1], [schema])
    jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert output.metrics.mean_run_length > 1.5
