"""Outputs: log-probabilities are named when a caller looks, and look like lists of dicts from then on."""

from __future__ import annotations

import copy
import pickle

import pytest

from outrider.core import TokenLogprobs
from outrider.core.output_reader import OutputReader
from outrider.core.outputs import (
    CompletionOutput,
    Logprob,
    OutputIncrement,
    PromptRows,
    RequestMetrics,
    RequestOutput,
    SampleKey,
)
from outrider.core.params import RequestOutputKind, SamplingParams, check_params

KEY = SampleKey("a", 0, 7, RequestMetrics())
FIRST = TokenLogprobs((5, 5, 6), (-0.5, -0.5, -1.0), 1, ("five", "five", "six"))
SECOND = TokenLogprobs((9, 5, 6), (-3.0, -0.25, -2.0), 4)
NAMED = [{5: Logprob(-0.5, 1, "five"), 6: Logprob(-1.0, 2, "six")},
         {9: Logprob(-3.0, 4), 5: Logprob(-0.25, 1), 6: Logprob(-2.0, 2)}]


def grown() -> RequestOutput:
    output = RequestOutput.empty("a", None, [1], SamplingParams(logprobs=2))
    output.grow(OutputIncrement(KEY, [5], logprobs=[FIRST]))
    output.grow(OutputIncrement(KEY, [9], logprobs=[SECOND]))
    return output


def test_entries_are_named_in_the_order_of_rank_with_a_chosen_outsider_first() -> None:
    sample = grown().outputs[0]
    assert sample.logprobs == NAMED and [list(entry) for entry in sample.logprobs] == [[5, 6], [9, 5, 6]]
    assert sample.cumulative_logprob == pytest.approx(-3.5)


def test_a_look_in_between_changes_nothing() -> None:
    output = RequestOutput.empty("a", None, [1], SamplingParams(logprobs=2))
    assert output.outputs[0].logprobs == []
    output.grow(OutputIncrement(KEY, [5], logprobs=[FIRST]))
    assert output.outputs[0].logprobs == NAMED[:1]
    output.grow(OutputIncrement(KEY, [9], logprobs=[SECOND]))
    assert output.outputs[0].logprobs == NAMED and output == grown()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, RequestOutput.copy,
                                  lambda output: pickle.loads(pickle.dumps(output))])
def test_copies_have_entries_that_nobody_looked_at(make: object) -> None:
    assert callable(make)
    twin = make(grown())
    assert twin.outputs[0].logprobs == NAMED and "six" in repr(grown())


def test_cutting_back_cuts_entries_that_nobody_looked_at() -> None:
    output = grown()
    assert output.cut_back() == {0: [5]} and output.outputs[0].logprobs == NAMED[:1]


def test_who_asked_for_none_has_none() -> None:
    assert CompletionOutput(0).logprobs is None and CompletionOutput(0).cumulative_logprob is None


def test_a_callers_list_may_change_after_it_was_given() -> None:
    allowed = [1, 2]
    own = check_params(SamplingParams(allowed_token_ids=allowed))
    allowed.append(3)
    assert own.allowed_token_ids == [1, 2]


def test_spans_of_versions_follow_growth_cuts_and_parts() -> None:
    sample = CompletionOutput(0)
    for version, count in [(0, 2), (0, 1), (2, 4), (5, 1)]:
        sample.note_version(version)
        sample.token_ids += [1] * count
    assert sample.weight_versions == [(0, 0, 3), (2, 3, 7), (5, 7, 8)]
    for first, stop, expected in [(0, 7, [(0, 0, 3), (2, 3, 7)]), (0, 3, [(0, 0, 3)]), (0, 0, [(0, 0, 0)]),
                                  (3, 8, [(2, 0, 4), (5, 4, 5)]), (5, 8, [(2, 0, 2), (5, 2, 3)]), (7, 8, [(5, 0, 1)])]:
        part = CompletionOutput(0, token_ids=sample.token_ids[first:stop], version_starts=sample.version_starts)
        part.cut_versions(first, stop)
        assert part.weight_versions == expected


def test_rows_of_a_prompt_are_named_when_a_caller_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands come in one step: to name them there would delay all other requests."""
    output = RequestOutput.empty("a", None, [1] * 4, SamplingParams(prompt_logprobs=2))
    monkeypatch.setattr("outrider.core.outputs.name_logprobs", None)
    output.grow(OutputIncrement(KEY, [], prompt_logprobs=PromptRows(1, [FIRST])))
    output.grow(OutputIncrement(KEY, [], prompt_logprobs=PromptRows(2, [FIRST, SECOND])))
    assert output.prompt_weight_versions == [(0, 0, 4)]
    output.grow(OutputIncrement(KEY, [], prompt_logprobs=PromptRows(2, [SECOND])))
    monkeypatch.undo()
    assert copy.deepcopy(output).prompt_logprobs == output.copy().prompt_logprobs == [None, *NAMED]
    assert pickle.loads(pickle.dumps(output)) == output and output.prompt_logprobs == [None, *NAMED]
    output.grow(OutputIncrement(KEY, [], prompt_logprobs=PromptRows(1, [SECOND])))
    assert output.prompt_logprobs == [None, NAMED[1]]


def test_rows_of_a_prompt_are_named_by_version_and_replaced() -> None:
    output = RequestOutput.empty("a", None, [1] * 9, SamplingParams(prompt_logprobs=0))
    reader = OutputReader(RequestOutputKind.DELTA)
    assert output.prompt_weight_versions == []

    def grow(version: int, start: int, count: int) -> RequestOutput:
        rows = PromptRows(start, [TokenLogprobs((1, 1), (float(version), float(version)), 1)] * count)
        output.grow(OutputIncrement(KEY._replace(weights_version=version), [], prompt_logprobs=rows))
        return reader.read(output)

    assert grow(2, 1, 3).prompt_weight_versions == output.prompt_weight_versions == [(2, 0, 4)]
    assert grow(3, 4, 0).prompt_logprobs == [] and output.prompt_weight_versions == [(2, 0, 4)]
    assert grow(3, 4, 2).prompt_weight_versions == [(3, 0, 2)]
    assert output.prompt_weight_versions == [(2, 0, 4), (3, 4, 6)]
    assert grow(4, 1, 2).prompt_logprobs == [] and output.prompt_weight_versions == [(4, 0, 3)]
    assert grow(4, 3, 5).prompt_weight_versions == [(4, 0, 2)], "the two that the reader has not seen"
    assert grow(4, 8, 1).prompt_weight_versions == [(4, 0, 1)]
    assert output.prompt_weight_versions == [(4, 0, 9)]
    assert output.prompt_logprobs == [None, *[{1: Logprob(4.0, 1)}] * 8]
    output.cut_back()
    assert output.prompt_logprobs == [None] and output.prompt_weight_versions == []
