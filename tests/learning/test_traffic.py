"""The record of served texts: it holds exactly what was computed and accepted, of requests that may be recorded, and
its memory is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider.core import Admission
from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.drafters.base import Step
from outrider.features.embeddings.part import PromptEmbeds
from outrider.features.grammars.form_lease import FormLease
from outrider.features.learning import learner as learner_module
from outrider.features.learning.traffic import RingSegment, ServedText, TrafficRing
from outrider.features.spans.part import PromptSpans
from outrider.lora_request import LoadedAdapter
from outrider.pooling_params import PoolingParams
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, greedy
from tests.engine.test_no_host_reads import MODES, PlansMayRead, guard_steps
from tests.learning.rigs import (
    SETTINGS,
    learner_of,
    learning_rig,
    naive_aux_states,
    prompts,
    shifted_prompts,
    target,
    without_thread,
)


def texts_in(rig: Rig) -> list[tuple[list[int], torch.Tensor, int]]:
    ring = learner_of(rig).ring
    segments = [*ring.closed(is_held_out=False), *ring.closed(is_held_out=True)]
    return [(text.tokens.tolist(), text.aux_states, text.answer_from) for text in ring.read(segments)]


def check_against_naive(rig: Rig, outputs: list[RequestOutput], asked: list[list[int]], length: int) -> int:
    """Every recorded text is the end of a served one, with the target's residual streams. Returns how many they are."""
    served = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(asked, outputs, strict=True)]
    recorded = texts_in(rig)
    for tokens, aux_states, answer_from in recorded:
        # The last token of a text may not be computed; of a preempted request, the prefix cache has the first part.
        index, end = next((index, end) for index, text in enumerate(served) for end in range(len(text), 0, -1)
                          if text[max(0, end - len(tokens)) : end] == tokens)
        is_whole = len(tokens) == min(length, end) and end >= len(served[index]) - 1
        assert is_whole or rig.scheduler.stats.num_preemptions
        assert answer_from == max(1, len(asked[index]) - (end - len(tokens)))
        torch.testing.assert_close(aux_states, naive_aux_states(served[index])[end - len(tokens) : end], rtol=0,
                                   atol=1e-5)
    return len(recorded)


def test_after_every_step_a_segment_holds_what_was_accepted_and_every_place_has_one_writer(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Most drafts after these prompts are rejected, and one prompt is longer than two segments."""
    without_thread(monkeypatch)
    monkeypatch.setattr(learner_module, "SEGMENT_TOKENS", 20)
    asked = shifted_prompts(4, seed=4)
    asked[0] = asked[0] * 7
    find_places, written = TrafficRing._places, []

    def watched(ring: TrafficRing, step: Step) -> torch.Tensor:
        written.append(find_places(ring, step))
        return written[-1]

    monkeypatch.setattr(TrafficRing, "_places", watched)
    with learning_rig(overlap=False) as rig:
        ring = learner_of(rig).ring

        def check() -> None:
            for request in rig.scheduler._running:
                start, end = ring._open[request.row].start, request.settled.at_least
                held = ring.positions[start : start + 20]
                assert sorted(held[held >= 0].tolist()) == list(range(max(0, end - 20), end))

        rig.run([Ask(prompt, greedy(24, ignore_eos=True)) for prompt in asked], after_step=check)
        stats = rig.engine.stats
        assert stats.num_accepted_tokens < 0.5 * stats.num_draft_tokens
        assert max(batch.num_known[0] for batch in rig.batches) > 40
        for places in written:
            own = places[places < ring._nowhere]
            assert len(own.unique()) == len(own)


@pytest.mark.parametrize("condition", [
    "overlap", "preempted", "captured", *(pytest.param(name, marks=pytest.mark.long) for name in ("chunks", "padded"))])
def test_the_record_is_what_was_served(condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are rejected on the way, and most texts are longer than segments."""
    without_thread(monkeypatch)
    monkeypatch.setattr(learner_module, "SEGMENT_TOKENS", 20)
    settings: dict[str, Any] = {"chunks": {"max_num_batched_tokens": 17}, "overlap": {"overlap": True},
                "padded": {"pad_requests": (16,), "pad_tokens": (64,)}}.get(condition, {})
    asked = [prompt * (3 if index == 0 else 1) for index, prompt in enumerate(prompts(8, seed=5))]
    with learning_rig(**settings) as rig:
        captured = AsCaptured(rig) if condition == "captured" else None
        outputs = rig.run([Ask(prompt, greedy(10 + 3 * index)) for index, prompt in enumerate(asked)],
                          after_step=rig.preempt if condition == "preempted" else None)
        rig.run([Ask(asked[0][:4], greedy(1))])  # the next batch tells that the others have left
        assert captured is None or captured.met
        stats = rig.engine.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        count = check_against_naive(rig, outputs, asked, 20)
        assert count == len(asked)


def test_recording_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the device could not be captured."""
    without_thread(monkeypatch)
    monkeypatch.setattr("outrider.mixers.paged.torch_backend.TorchBackend", PlansMayRead)
    with Rig(target(), **SETTINGS | {"overlap": False}) as rig:
        guard_steps(rig, MODES["inference_mode"])
        rig.run([Ask(prompt, greedy(6)) for prompt in prompts(3, seed=6)])
        assert learner_of(rig).ring._open


@pytest.mark.parametrize("is_preempted", [False, True])
def test_nothing_is_kept_of_aborted_requests_and_of_those_with_a_salt(is_preempted: bool,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of a request that is aborted after it was preempted: its texts of both times are dropped."""
    without_thread(monkeypatch)
    first, second, third = prompts(3, seed=6)
    with learning_rig(overlap=True) as rig:
        checks = rig.engine.checks
        for name, prompt in (("aborted", first), ("served", third)):
            rig.outputs.add(name, prompt, greedy(20))
        salted = {"prompt_token_ids": second, "cache_salt": "tenant"}
        rig.engine.add({"salted": checks.check(salted, greedy(20), 0)})
        for _ in range(4):
            rig.engine.step()
        if is_preempted:
            rig.scheduler._preempt(next(own for own in rig.scheduler._running if own.token_ids[: len(first)] == first))
            for _ in range(3):
                rig.engine.step()
        rig.engine.abort("aborted")
        while rig.engine.has_work:
            rig.engine.step()
        rig.run([Ask(first[:4], greedy(1))])
        (recorded,) = texts_in(rig)
        assert recorded[0][: len(third)] == third
        assert len(recorded[0]) == len(third) + 19


@pytest.mark.parametrize("fields", [
    {"parts": (LoadedAdapter(1),)}, {"cache_salt": "tenant"}, {"parts": (PromptSpans(((0, 2),)),)},
    {"parts": (PromptEmbeds(np.zeros((1, 4)), np.arange(1), ""),)},
    {"is_pooled": True}, {}], ids=lambda fields: next(iter(fields), "plain"))
def test_what_is_not_the_models_own_answer_is_never_recorded(fields: dict[str, Any],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    without_thread(monkeypatch)
    params = PoolingParams() if fields.pop("is_pooled", False) else SamplingParams(seed=1)
    is_own = not fields and isinstance(params, SamplingParams)
    with learning_rig() as rig:
        ring = learner_of(rig).ring
        ring.admit([Admission(3, CheckedRequest((5, 6, 7), params, **fields), 0, 20)])
        assert (3 in ring._open) == is_own == bool(ring._start_of[3] >= 0)


def test_a_part_that_changes_no_keys_and_no_values_keeps_no_text_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a request with a grammar is the model's own: its tokens are allowed ones that the model chose."""
    without_thread(monkeypatch)
    with learning_rig() as rig:
        ring = learner_of(rig).ring
        request = CheckedRequest((5, 6, 7), SamplingParams(seed=1), parts=(FormLease(0, b"", None),))
        ring.admit([Admission(3, request, 0, 20)])
        assert 3 in ring._open


def test_nothing_is_kept_of_a_request_whose_answer_was_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only token is sampled, and its hidden states are the prompt's: there is nothing to learn from."""
    without_thread(monkeypatch)
    with learning_rig() as rig:
        ring = learner_of(rig).ring
        for prompt, max_tokens in zip(prompts(3, seed=6), (1, 2, 1), strict=True):
            rig.run([Ask(prompt, greedy(max_tokens, ignore_eos=True))])
        assert ring.num_texts == 1 and len(ring._free) + 2 == ring._nowhere // ring.segment_tokens


def test_memory_is_bounded_and_the_oldest_text_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    without_thread(monkeypatch)
    monkeypatch.setattr(learner_module, "SEGMENT_TOKENS", 16)
    token_bytes = 3 * 96 * 8 + 16
    with learning_rig(adapt_memory_bytes=16 * 16 * token_bytes, max_num_seqs=16) as rig:
        ring: TrafficRing = learner_of(rig).ring
        size = ring.num_bytes
        assert size <= 17 * 16 * token_bytes
        asked = prompts(24, seed=7)
        for prompt in asked:
            rig.run([Ask(prompt, greedy(3))])
        assert ring.num_bytes == size and ring.num_texts == 23
        segments = [*ring.closed(is_held_out=False), *ring.closed(is_held_out=True)]
        assert sorted(segment.number for segment in segments) == list(range(8, 23))
        # More requests at once than the ring records: the others are served and leave no trace.
        rig.run([Ask(prompt, greedy(6)) for prompt in asked[:16]])
        assert len(ring._open) == 12


def test_a_text_is_never_read_from_a_segment_that_another_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are chosen once and read later, while requests take the segments of the oldest ones."""
    without_thread(monkeypatch)
    monkeypatch.setattr(learner_module, "SEGMENT_TOKENS", 16)
    with learning_rig(adapt_memory_bytes=16 * 16 * (3 * 96 * 8 + 16), max_num_seqs=16) as rig:
        ring, asked = learner_of(rig).ring, prompts(40, seed=9)
        for prompt in asked[:18]:
            rig.run([Ask(prompt, greedy(3))])
        training, held_out = (ring.closed(is_held_out=is_held_out) for is_held_out in (False, True))
        assert [text.number % 4 for text in held_out] == [3] * 4 and all(text.number % 4 < 3 for text in training)
        wanted = {tuple(text.tokens.tolist()) for text in ring.read(training)}
        assert len(wanted) == len(training) == 11 and len(ring.read(held_out)) == len(held_out) == 4
        for prompt in asked[18:]:
            rig.run([Ask(prompt, greedy(3))])
            texts = {tuple(text.tokens.tolist()) for text in ring.read(training)}
            assert texts <= wanted and len(texts) == len({*training} & {*ring.closed(is_held_out=False)})
        assert not texts and not ring.read(held_out) and len(ring.closed(is_held_out=False)) >= 11


def test_what_a_step_wrote_behind_the_end_of_a_text_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight may go on with a request that the host has ended."""
    without_thread(monkeypatch)
    with learning_rig() as rig:
        ring = learner_of(rig).ring
        for prompt in prompts(2, seed=13):
            rig.run([Ask(prompt, greedy(6, ignore_eos=True))])
        (text,) = ring.closed(is_held_out=False)
        (before,) = ring.read([text])
        end = text.segment.num_served
        ring.positions[text.segment.start + end] = end
        (after,) = ring.read([text])
        assert len(before.tokens) == end and torch.equal(after.tokens, before.tokens)


def test_no_segment_is_given_to_a_request_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests come meanwhile as may be recorded, and the oldest text is the one that is read."""
    without_thread(monkeypatch)
    monkeypatch.setattr(learner_module, "SEGMENT_TOKENS", 16)
    with learning_rig(adapt_memory_bytes=16 * 16 * (3 * 96 * 8 + 16), max_num_seqs=16) as rig:
        ring, inner = learner_of(rig).ring, TrafficRing._read
        for prompt in prompts(18, seed=10):
            rig.run([Ask(prompt, greedy(3))])
        oldest = min([*ring.closed(is_held_out=False), *ring.closed(is_held_out=True)], key=lambda text: text.number)
        (expected,) = ring.read([oldest])

        def reads(self: TrafficRing, segment: RingSegment) -> ServedText | None:
            request = CheckedRequest((5, 6, 7), SamplingParams(seed=1))
            ring.admit([Admission(row, request, 0, 20) for row in range(1, 13)])
            return inner(self, segment)

        monkeypatch.setattr(TrafficRing, "_read", reads)
        (found,) = ring.read([oldest])
        assert torch.equal(found.tokens, expected.tokens) and len(ring._open) == 12
        assert oldest.segment not in ring._open.values() and not oldest.segment.is_borrowed


def test_a_failed_step_leaves_nothing_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    without_thread(monkeypatch)
    with learning_rig() as rig:
        ring = learner_of(rig).ring
        rig.run([Ask(prompt, greedy(8)) for prompt in prompts(2, seed=8)])
        assert len(ring._open) == 2
        rig.step.reset()
        assert not ring._open and not ring.closed(is_held_out=False) and bool((ring._start_of == -1).all())
