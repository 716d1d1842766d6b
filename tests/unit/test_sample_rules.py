"""Single rules of the sampler, stated by example: ties, filters, temperature, bad rows, penalties, needs."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.core import Admission, Limits
from outrider.core.params import SamplingParams
from outrider.core.token_ids import check_stop_ids, check_token_ids
from outrider.kernels import cpu as native
from outrider.kernels import ops
from outrider.sample import SamplingRows, StepExtras, StepNeeds
from outrider.sample.draw import draw_tokens
from outrider.sample.filters import keep_likely, scale
from outrider.sample.sampler import edit_logits, sample_chunk
from tests.unit.made_requests import Masks, made_admission, made_request
from tests.unit.test_sample_reference import LIMITS, VOCAB, Case, make_batch, naive_edits

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def logits_of(*values: float, fill: float = -5.0) -> np.ndarray:
    return np.array([[*values, *[fill] * (VOCAB - len(values))]], dtype=np.float32)


def one(params: SamplingParams, logits: np.ndarray, **fields: Any) -> Case:
    return Case(**{"params": params, "known": (1,), "prompt_len": 1, "drafts": (), "logits": logits, **fields})


def draws(params: SamplingParams, logits: np.ndarray, num: int = 300) -> set[int]:
    """The tokens that `num` seeds draw."""
    found: set[int] = set()
    for start in range(0, num, LIMITS.max_requests):
        batch = make_batch([one(params, logits, seed=start + i) for i in range(LIMITS.max_requests)])
        found.update(batch.sample().tokens.tolist())
    return found


def kept(logits: np.ndarray, beside: SamplingParams = GREEDY, **fields: Any) -> list[int]:
    """The tokens that may be drawn, beside another request."""
    batch = make_batch([one(SamplingParams(**fields), logits), one(beside, logits)])
    scaled = scale(batch.logits, batch.logit_rows.row, batch.rows)
    keep_likely(scaled, batch.logit_rows.row, batch.rows, batch.needs)
    return scaled[0].isfinite().nonzero().flatten().tolist()


class TestTies:
    def test_greedy_takes_the_lowest_id_alone_and_beside_a_sampled_request(self) -> None:
        tied = one(GREEDY, logits_of(0, 2, 1, 2, 2))
        assert make_batch([tied]).sample().tokens.tolist() == [1]
        assert make_batch([one(SamplingParams(), logits_of(9)), tied]).sample().tokens.tolist()[1] == 1

    def test_filters_keep_everything_tied_with_the_threshold(self) -> None:
        logits = logits_of(3, 2, 2, 2, 1)
        assert kept(logits, top_k=1) == [0]
        assert kept(logits, top_k=2) == [0, 1, 2, 3]
        assert kept(logits, top_p=0.6) == [0, 1, 2, 3]
        assert kept(logits_of(*[0.0] * VOCAB), top_p=0.01) == list(range(VOCAB))

    def test_two_zeros_are_one_value(self) -> None:
        batch = make_batch([one(replace(GREEDY, logprobs=3), logits_of(-0.0, 0.0, -1.0))])
        found = batch.sample()
        assert found.tokens.tolist() == [0] and found.logprobs is not None
        assert found.logprobs.top_ids.tolist() == [[0, 1, 2]]


class TestFilters:
    def test_top_p_keeps_the_smallest_set_that_reaches_p(self) -> None:
        probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
        logits = logits_of(*np.log(probabilities), fill=-np.inf)
        expected = [(0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (0.875, 3), (0.9, 5), (1.0, 5)]
        for top_p, num in expected:
            assert kept(logits, top_p=top_p) == list(range(num)), top_p

    def test_top_p_agrees_with_sums_of_floats_where_nothing_is_tied(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(20):
            logits = random.normal(0, 2, (1, VOCAB))
            order = np.argsort(-logits[0])
            p = np.exp(logits[0][order]) / np.exp(logits[0]).sum()
            num = int((np.cumsum(p) - p < 0.7).sum())
            assert kept(logits, top_p=0.7) == sorted(order[:num].tolist())

    def test_top_p_counts_only_what_top_k_and_min_p_left(self) -> None:
        logits = logits_of(2.0, 1.9, 1.8, 1.7, 1.6)
        assert kept(logits, top_p=0.5) == [0, 1, 2]
        assert kept(logits, top_p=0.5, top_k=2) == [0]
        assert kept(logits, top_p=0.5, min_p=0.85) == [0]

    def test_a_small_top_k_beside_top_p_gives_what_a_whole_sort_gives(self) -> None:
        logits = logits_of(2, 2, 1, 1, 1, 0, 0)
        batch = make_batch([one(SamplingParams(top_k=3, top_p=0.95), logits)])
        for needs in (batch.needs, replace(batch.needs, any_top_p_alone=True)):
            scaled = scale(batch.logits, batch.logit_rows.row, batch.rows)
            keep_likely(scaled, batch.logit_rows.row, batch.rows, needs)
            assert scaled[0].isfinite().nonzero().flatten().tolist() == [0, 1, 2, 3, 4]

    def test_a_threshold_is_that_of_its_own_logit_row_however_deep_the_batch_looks(self) -> None:
        logits = logits_of(2.0, 1.9, 1.8, 1.7, 1.6)
        own = [({"top_k": 2}, [0, 1]), ({"top_k": 2, "top_p": 0.5}, [0]), ({"top_p": 0.5}, [0, 1, 2])]
        for fields, expected in own:
            for mate in ({"top_k": 1}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 4, "top_p": 0.3}):
                assert kept(logits, beside=SamplingParams(**mate), **fields) == expected

    def test_top_p_counts_the_ties_that_lie_deeper_than_the_batch_looks(self) -> None:
        assert kept(logits_of(1, 0, 0, 0, fill=-9), top_k=2, top_p=0.7) == [0, 1, 2, 3]

    def test_min_p_is_relative_to_the_likeliest(self) -> None:
        assert kept(logits_of(0, np.log(0.5), np.log(0.2)), min_p=0.3) == [0, 1]
        assert kept(logits_of(1, 1, 0.9), min_p=1.0) == [0, 1]

    def test_what_is_drawn_is_what_was_kept_and_all_of_it(self) -> None:
        assert draws(SamplingParams(top_k=3), logits_of(1, 1, 1, 0.9, 0.9)) == {0, 1, 2}
        assert draws(SamplingParams(), logits_of(1, 1, 1, 1, fill=-60)) == {0, 1, 2, 3}


class TestTemperature:
    def test_a_tiny_temperature_is_greedy_even_where_the_quotient_overflows(self) -> None:
        logits = logits_of(1.0, 1.0000001, 1.0000002, 1.0)
        for temperature in (1e-44, 1e-50, 1e-30):
            assert draws(SamplingParams(temperature=temperature), logits, num=20) == {2}

    def test_a_huge_temperature_draws_evenly(self) -> None:
        assert draws(SamplingParams(temperature=1e30), logits_of(50), num=600) == set(range(VOCAB))


class TestBadRows:
    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2, top_p=0.5, min_p=0.1),
                                        replace(GREEDY, repetition_penalty=1.2), SamplingParams(logprobs=2)])
    @pytest.mark.parametrize("where", ["nan", "inf", "all nan", "all -inf"])
    def test_they_are_reported_and_their_mates_are_untouched(self, params: SamplingParams, where: str) -> None:
        broken = logits_of(1, 2, 3)
        if where.startswith("all"):
            broken[:] = float(where.split()[1])
        else:
            broken[0, 4] = float(where)
        fine = one(params, logits_of(1, 2, 3), seed=4)
        alone = make_batch([fine]).sample()
        found = make_batch([fine, one(params, broken), fine]).sample()
        assert found.bad.tolist() == [False, True, False]
        assert found.tokens.tolist() == [alone.tokens[0], 0, alone.tokens[0]]

    def test_a_nan_that_is_not_allowed_still_counts(self) -> None:
        case = one(replace(GREEDY, allowed_token_ids=[0, 1]), logits_of(1, 2, np.nan))
        assert make_batch([case]).sample().bad.tolist() == [True]

    def test_nothing_left_to_choose_is_bad(self) -> None:
        params = replace(GREEDY, allowed_token_ids=[3], min_tokens=2)
        assert make_batch([one(params, logits_of(1, 2), eos_ids=(3,))]).sample().bad.tolist() == [True]
        assert make_batch([one(params, logits_of(1, 2), eos_ids=(4,))]).sample().tokens.tolist() == [3]


class TestEdits:
    def test_penalties_see_the_drafts_before_each_logit_row(self) -> None:
        logits = np.repeat(logits_of(1.0, 0.9, 0.8), 3, axis=0)
        case = one(replace(GREEDY, presence_penalty=2.0), logits, drafts=(0, 1))
        assert make_batch([case]).sample().tokens.tolist() == [0, 1, 2]

    def test_presence_and_frequency_do_not_look_at_the_prompt_and_repetition_does(self) -> None:
        prompt = {"known": (0, 0), "prompt_len": 2}
        logits = logits_of(1.0, 0.9)
        assert make_batch([one(replace(GREEDY, presence_penalty=2.0), logits, **prompt)]).sample().tokens[0] == 0
        assert make_batch([one(replace(GREEDY, frequency_penalty=2.0), logits, **prompt)]).sample().tokens[0] == 0
        assert make_batch([one(replace(GREEDY, repetition_penalty=2.0), logits, **prompt)]).sample().tokens[0] == 1

    def test_a_bad_word_may_end_in_the_drafts_and_begin_in_the_known_tokens(self) -> None:
        logits = np.repeat(logits_of(0.5, 1.0), 2, axis=0)
        params = replace(GREEDY, bad_words_token_ids=((7, 8, 1),))
        case = one(params, logits, known=(5, 7), drafts=(8,))
        assert make_batch([case]).sample().tokens.tolist() == [1, 0]
        assert make_batch([replace(case, known=(7, 5))]).sample().tokens.tolist() == [1, 1]

    def test_a_bad_word_longer_than_the_history_does_not_match(self) -> None:
        params = replace(GREEDY, bad_words_token_ids=((1, 1, 1, 2),))
        assert make_batch([one(params, logits_of(0, 0, 1), known=(1, 1))]).sample().tokens.tolist() == [2]
        assert make_batch([one(params, logits_of(0, 0, 1), known=(1, 1, 1))]).sample().tokens.tolist() == [0]

    def test_min_tokens_counts_outputs_and_drafts(self) -> None:
        params = replace(GREEDY, min_tokens=2, stop_token_ids=[4])
        logits = np.repeat(logits_of(0, 1, 0, 0, 2, 3), 3, axis=0)
        case = one(params, logits, known=(9, 9, 9), prompt_len=3, drafts=(1, 1), eos_ids=(5,))
        assert make_batch([case]).sample().tokens.tolist() == [1, 1, 5]


class TestNeeds:
    def test_requests_without_logit_rows_ask_for_nothing(self) -> None:
        loud = SamplingParams(
            top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1, repetition_penalty=2, min_tokens=1, logit_bias={1: 1},
            allowed_token_ids=[1], bad_words_token_ids=((1,),), logprobs=3,
        )
        assert StepNeeds.from_params([loud, GREEDY], [0, 1]) == StepNeeds()
        assert StepExtras.from_params([loud, GREEDY], [0, 1], torch.device("cpu")) == StepExtras()
        needs = StepNeeds.from_params([loud, GREEDY], [1, 1])
        assert needs.any_sampled and needs.any_penalties and needs.any_top_k and needs.any_edits
        assert needs.max_logprobs == 3 and not needs.any_top_p_alone

    def test_the_whole_vocabulary_is_more_than_any_number_of_logprobs(self) -> None:
        params = [replace(GREEDY, logprobs=n) for n in (5, -1, 0)]
        assert StepNeeds.from_params(params, [1, 1, 1]).max_logprobs == -1
        assert StepNeeds.from_params(params, [1, 0, 1]).max_logprobs == 5
        assert StepNeeds.from_params(params, [0, 0, 1]).max_logprobs == 0

    def test_a_greedy_batch_is_one_argmax(self) -> None:
        """Filters of greedy requests cost nothing either: generation configs set them for everybody."""
        batch = make_batch([one(replace(GREEDY, top_k=20, top_p=0.8), logits_of(1, 2)) for _ in range(3)])
        with Wide(batch.logits.numel()) as wide, ops.using("torch", draw_tokens, sample_chunk):
            batch.sample()
        assert wide.seen == ["argmax", "gather"]
        if native.available():
            with Wide(batch.logits.numel()) as wide:
                batch.sample()
            assert wide.seen == []

    def test_extras_of_another_batch_are_refused(self) -> None:
        batch = make_batch([one(replace(GREEDY, logit_bias={1: 1.0}), logits_of(1))])
        with ops.using("torch", sample_chunk), pytest.raises(AssertionError, match="logit bias"):
            replace(batch, extras=StepExtras()).sample()

    def test_extras_follow_the_logit_rows(self) -> None:
        params = [GREEDY, replace(GREEDY, bad_words_token_ids=((5, 6), (7,))), GREEDY]
        extras = StepExtras.from_params(params, [2, 2, 1], torch.device("cpu"))
        assert _forbidden(extras) == [(2, 6), (2, 7), (3, 6), (3, 7)]
        assert _forbidden(extras.between(3, 5)) == [(0, 6), (0, 7)]
        assert _forbidden(extras.between(4, 5)) == []

    def test_a_list_is_kept_once_however_many_logit_rows_have_it(self) -> None:
        """A prompt of thousands of tokens may come with thousands of biases: their product would fill the memory."""
        params = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0),
                                bad_words_token_ids=tuple((5, token) for token in range(1000)))
        tracemalloc.start()
        extras = StepExtras.from_params([params], [5000], torch.device("cpu"))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 10e6
        assert extras.bias is not None and extras.bias.token.numel() == 1000
        assert [own.last.numel() for own in extras.bad_words] == [1000]

    def test_no_word_is_padded_to_the_length_of_a_much_longer_one(self) -> None:
        params = SamplingParams(bad_words_token_ids=((1,) * 1000, *((2, token) for token in range(1000)), (3,)))
        extras = StepExtras.from_params([params], [1], torch.device("cpu"))
        assert sorted(own.before.numel() for own in extras.bad_words) == [0, 1000, 1024]
        assert len(_forbidden(extras)) == 1002

    @pytest.mark.parametrize("most", [1, 7, 1000])
    def test_pieces_of_pairs_are_bounded_and_change_nothing(self, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outrider.sample.listed_rows.MOST_PAIRS", most)
        params = replace(GREEDY, logit_bias={1: 1.0, 2: -2.0, 4: 9.0}, bad_words_token_ids=((5, 6, 1), (7,), (4,)))
        logits = np.repeat(logits_of(*range(VOCAB)), 3, axis=0)
        drawn = [one(params, logits, known=(5, 6), drafts=(4, 3)), one(GREEDY, logits[:1]), one(params, logits[:1])]
        batch = make_batch(drawn)
        assert batch.extras.bias is not None
        pieces = [len(row) for row, _ in batch.extras.bias.rows.pairs()]
        assert sum(pieces) == 12 and max(pieces) <= max(3, most)
        wanted = torch.from_numpy(np.concatenate([naive_edits(case, j) for case in drawn
                                                  for j in range(len(case.logits))]).reshape(5, VOCAB))
        assert torch.equal(edit_logits(batch.logits, batch.asked), wanted)


def _forbidden(extras: StepExtras) -> list[tuple[int, int]]:
    """Pairs of a logit row and the last token of a bad word that it has."""
    found = [(row, token) for own in extras.bad_words for rows, entry in own.rows.pairs(own.before.shape[1])
             for row, token in zip(rows.tolist(), own.last[entry].tolist(), strict=True)]
    return sorted(found)


class Wide(TorchDispatchMode):
    """Names the operations that touch a tensor of at least so many elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
        if any(x.numel() >= self.size for x in tensors):
            self.seen.append(func.overloadpacket.__name__)
        return out


class TestRows:
    def test_stop_ids_are_eos_and_the_requests_own_each_once(self) -> None:
        assert made_request([1], SamplingParams(stop_token_ids=[4, 2])).stop_ids((2, 3)) == [2, 3, 4]
        endless = SamplingParams(stop_token_ids=[4], ignore_eos=True)
        assert made_request([1], endless).stop_ids((2, 3)) == [4]
        assert made_request([1], endless, parts=(Masks(),)).stop_ids((2, 3)) == [2, 3, 4], "its masks decide"

    def test_admitting_writes_its_rows_and_no_others(self) -> None:
        rows = SamplingRows(LIMITS, torch.device("cpu"))
        first = SamplingParams(temperature=0.5, top_k=-1, stop_token_ids=[1, 2])
        second = replace(GREEDY, top_p=0.5, top_k=7, min_p=0.1)

        def admission(row: int, params: SamplingParams) -> Admission:
            return made_admission(row, [1], 9, params, sample_index=2, seed=-5)

        rows.admit([admission(4, first), admission(2, second)])
        assert rows.temperature.tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0]
        assert rows.seed[[2, 3, 4]].tolist() == [-5, 0, -5] and rows.end_len[4] == 9 and rows.sample_index[4] == 2
        assert rows.stop_ids[4].tolist() == [1, 2, 0, 0, 0] and rows.num_stop_ids[[2, 4]].tolist() == [0, 2]
        assert rows.top_k[4] == 0, "-1 and 0 mean all"
        assert (rows.top_k[2], rows.top_p[2], rows.min_p_floor[2]) == (0, 1, -torch.inf), "a greedy row has no filters"
        rows.admit([admission(4, second)])
        assert rows.num_stop_ids[4] == 0 and rows.temperature[4] == 0, "nothing of the last owner stays"
        rows.admit([])

    @pytest.mark.parametrize(("fields", "message"), [
        ({"stop_token_ids": [1, 2, 3, 4, 5]}, "6 stop token ids"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids: token id 13"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: token id 13"),
        ({"allowed_token_ids": [2, 99]}, "allowed_token_ids: token id 99"),
        ({"bad_words_token_ids": ((2, 77),)}, "bad_words: token id 77"),
        ({"bad_words_token_ids": ((),)}, "bad_words: one of the words has no tokens"),
    ])
    def test_what_the_device_cannot_hold_is_refused_by_name(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            params = SamplingParams(**fields)
            check_token_ids(params, LIMITS)
            check_stop_ids(made_request([1], params).stop_ids((0,)), LIMITS)
        check_stop_ids([0, 1, 2, 3, 4], Limits(9, 9, 9, 0, VOCAB, max_stop_ids=5))
