"""Lists and counts that rows keep on the device: where lists lie, when their place is given back, what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import Admission, Limits
from outrider.core.params import SamplingParams
from outrider.kernels import sampling_flags as flags
from outrider.kernels.sampling_flags import IN_PROMPT
from outrider.sample import SamplingRows
from outrider.sample.arena import Arena
from outrider.sample.sampling_rows import NO_LOGPROBS
from tests.unit.made_requests import made_admission

LIMITS = Limits(max_requests=4, max_batched_tokens=16, max_len=16, max_drafts=2, vocab_size=70, max_list_ints=40)
CPU = torch.device("cpu")


def admission(row: int, token_ids: tuple[int, ...] = (1, 2, 2, 3, 3, 3), **fields: Any) -> Admission:
    return made_admission(row, token_ids, 16, SamplingParams(**fields), prompt_len=3)


class TestArena:
    @given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
    def test_no_two_owners_share_and_nothing_is_lost(self, steps: list[tuple[bool, int]]) -> None:
        arena, owned = Arena(50), dict[int, int]()
        for takes, number in steps:
            if takes:
                start = arena.allocate(number)
                if start is not None:
                    owned[start] = number
            elif owned:
                start = sorted(owned)[number % len(owned)]
                arena.free(start)
                del owned[start]
            cells = [cell for start, size in owned.items() for cell in range(start, start + size)]
            assert len(cells) == len(set(cells)) and all(0 <= cell < 50 for cell in cells)
            assert arena.num_free == 50 - len(cells)
        for start in owned:
            arena.free(start)
        assert arena.allocate(50) == 0, "gaps that touch are one gap"

    def test_what_does_not_fit_gets_nothing(self) -> None:
        arena = Arena(10)
        assert arena.allocate(11) is None and arena.allocate(10) == 0 and arena.allocate(1) is None


class TestLists:
    def test_biases_and_words_lie_as_the_kernels_read_them(self) -> None:
        rows = SamplingRows(LIMITS, CPU)
        rows.admit([admission(2, logit_bias={5: 1.5, 9: -2.0}, bad_words_token_ids=((7,), (4, 5, 6)))])
        start, size = int(rows.bias_start[2]), int(rows.bias_len[2])
        assert size == 2 and rows.lists.ints[start : start + 2].tolist() == [5, 9]
        assert rows.lists.ints[start + 2 : start + 4].view(torch.float32).tolist() == [1.5, -2.0]
        start = int(rows.words_start[2])
        assert rows.num_words[2] == 2
        assert rows.lists.ints[start : start + 8].tolist() == [4, 1, 5, 3, 7, 6, 5, 4]

    def test_allowed_tokens_are_bits(self) -> None:
        rows = SamplingRows(LIMITS, CPU)
        rows.admit([admission(1, allowed_token_ids=[0, 31, 32, 69]), admission(3)])
        words = [int(word) & 0xFFFFFFFF for word in rows.lists.allowed[1]]
        assert words == [1 | 1 << 31, 1, 1 << 5] and not rows.lists.allowed[3].any()
        rows.admit([admission(1, allowed_token_ids=[2])])
        assert rows.lists.allowed[1].tolist() == [4, 0, 0], "nothing of the row's last owner is left"

    def test_a_shared_list_is_packed_once_and_an_equal_one_on_its_own(self) -> None:
        lists = SamplingRows(LIMITS, CPU).lists
        packs = list[list[int]]()

        def pack(tokens: list[int]) -> np.ndarray:
            packs.append(tokens)
            return np.array(tokens, dtype=np.int32)

        shared, others = [1, 2], [[n] for n in range(20)]
        for tokens in (shared, shared, [1, 2], *others, shared):
            assert lists._packed.get(tokens, pack).tolist() == tokens
        assert packs == [shared, [1, 2], *others, shared], "the last ones are kept, not all"

    def test_a_place_is_given_back_when_another_request_takes_the_row(self) -> None:
        rows = SamplingRows(LIMITS, CPU)
        long = {"logit_bias": {t: 1.0 for t in range(15)}}
        rows.admit([admission(1, **long)])
        rows.admit([admission(2, **long)])
        assert rows.lists.unplaced == {2}
        rows.admit([admission(1)])
        assert rows.lists.unplaced == {2}, "its lists are not moved in later"
        rows.admit([admission(2, **long), admission(3, logit_bias={1: 1.0})])
        assert not rows.lists.unplaced and rows.bias_len[[1, 2, 3]].tolist() == [0, 15, 1]

    def test_memory_is_fixed(self) -> None:
        rows = SamplingRows(LIMITS, CPU)
        before = rows.lists.ints.data_ptr()
        rows.admit([admission(1, logit_bias={1: 1.0})])
        assert rows.lists.ints.data_ptr() == before and rows.lists.num_bytes == 4 * (40 + 5 * 3)


class TestFlags:
    @pytest.mark.parametrize(("fields", "expected"), [
        ({}, 0), ({"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, 0), ({"top_k": 70}, 0),
        ({"top_k": 3, "top_p": 0.5}, flags.TOP_K | flags.TOP_P), ({"min_p": 0.1}, flags.MIN_P),
        ({"presence_penalty": 1.0}, flags.PENALTIES), ({"temperature": 0.0, "min_tokens": 2}, flags.MIN_TOKENS),
        ({"logit_bias": {1: 1.0}, "allowed_token_ids": [1]}, flags.BIAS | flags.ALLOWED),
        ({"bad_words_token_ids": ((1,),)}, flags.BAD_WORDS),
    ])
    def test_a_row_says_which_stages_it_asks_for(self, fields: dict[str, Any], expected: int) -> None:
        rows = SamplingRows(LIMITS, CPU)
        rows.admit([admission(1, **fields)])
        assert rows.flags[1] == expected and rows.flags[0] == 0

    def test_log_probabilities_asked_for_are_in_the_row(self) -> None:
        rows = SamplingRows(LIMITS, CPU)
        rows.admit([admission(1, logprobs=0), admission(2, logprobs=5), admission(3)])
        assert rows.num_logprobs.tolist() == [NO_LOGPROBS, 0, 5, NO_LOGPROBS, NO_LOGPROBS]


class TestCounts:
    def test_memory_is_taken_when_the_first_request_with_penalties_comes(self) -> None:
        rows = SamplingRows(LIMITS, CPU)
        rows.admit([admission(1, top_p=0.5)])
        assert rows.counts.packed is None and rows.counts.num_bytes == 4 * 5 * 70
        rows.admit([admission(1, presence_penalty=1.0)])
        assert rows.counts.packed is not None and rows.counts.packed.numel() * 4 == rows.counts.num_bytes

    def test_prompt_and_outputs_are_counted_apart_and_moved_by_runs(self) -> None:
        rows = SamplingRows(LIMITS, CPU)
        rows.admit([admission(2, frequency_penalty=1.0), admission(3)])
        assert self.counts(rows, 2) == {1: IN_PROMPT, 2: IN_PROMPT, 3: 3}
        run = torch.tensor([[2, 9, 9], [5, 5, 5]])
        rows.counts.add_runs(torch.tensor([2, 0]), run, torch.tensor([2, 0]))
        assert self.counts(rows, 2) == {1: IN_PROMPT, 2: IN_PROMPT + 1, 3: 3, 9: 1}
        assert not self.counts(rows, 0)

    def test_a_resumed_request_counts_its_settled_outputs_again(self) -> None:
        rows = SamplingRows(LIMITS, CPU)
        rows.admit([admission(2, repetition_penalty=2.0)])
        rows.counts.add_runs(torch.tensor([2]), torch.tensor([[8, 9]]), torch.tensor([2]))
        resumed = admission(2, (1, 2, 2, 3, 3, 3, 8), repetition_penalty=2.0)  # 9 was not settled
        rows.admit([resumed])
        assert self.counts(rows, 2) == {1: IN_PROMPT, 2: IN_PROMPT, 3: 3, 8: 1}
        rows.admit([replace(resumed, row=1)])
        assert self.counts(rows, 1) == self.counts(rows, 2)

    def counts(self, rows: SamplingRows, row: int) -> dict[int, int]:
        assert rows.counts.packed is not None
        return {token: count for token, count in enumerate(rows.counts.packed[row].tolist()) if count}
