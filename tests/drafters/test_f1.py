"""Failure F1: an assistant's page tables and lengths spoke of two batch sizes, and attention died under partial load.

Here both come from one batch. Partly filled padded batches of every size, and 32 requests over 8 streams.
"""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import pytest

from outrider.cache.groups import Group
from outrider.core.params import SamplingParams
from outrider.mixers.batch import BatchView
from tests.drafters.rig import DraftRig, Proposal
from tests.drafters.trained import DRAFTS, accepted_counts, trained_asks, trained_prompts, trained_rig, trained_target
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tokens_of

PADDED = 8
ASKS = trained_asks(5, (1, 9, 15, 16, 17, 30, 33, 50), max_tokens=14)


def watch_plans(rig: DraftRig) -> list[tuple[BatchView, Group]]:
    """Every view the drafter plans attention over, with the group."""
    drafter: Any = rig.step.drafter
    (mixer,), seen = drafter._cached.mixers, []
    backend = mixer.backend

    class Watched:
        name = backend.name

        def plan(self, view: BatchView, group: Group) -> Any:
            seen.append((view, group))
            return backend.plan(view, group)

        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

    mixer.backend = Watched()
    return seen


@functools.cache
def unpadded_drafts() -> dict[tuple[int, ...], tuple[int, ...]]:
    """What each request's drafts are when it is alone in batches of its own size."""
    with trained_rig() as rig:
        rig.run_one_by_one(ASKS)
        assert rig.runner.num_padded_steps == 0
        return {proposal.known: proposal.drafts for proposal in rig.proposals}


@pytest.mark.parametrize("actual", range(1, PADDED + 1))
def test_f1_partly_filled_batches(actual: int) -> None:
    with trained_rig(pad_requests=(PADDED,), pad_tokens=(PADDED * (1 + DRAFTS),)) as rig:
        plans = watch_plans(rig)
        assert all(tokens_of(rig.run(ASKS[-actual:]))), "all finish without an error"
        assert rig.runner.num_padded_steps > 0
        assert max(batch.num_requests for batch in rig.batches) == actual
        own = {group.index for group in rig.step.drafter._cached.groups}  # type: ignore[union-attr]
        assert {group.index for _, group in plans} == own and len(own) == 2, "both groups, and no others"
        for view, group in plans:
            assert view.page_table(group).shape[0] == view.lengths.shape[0] == view.query_starts.shape[0] - 1 == PADDED
        check_drafts(rig.proposals)


def test_f1_padding_to_more_requests_than_there_are_rows() -> None:
    with trained_rig(max_num_seqs=2, pad_requests=(PADDED,), pad_tokens=(PADDED * (1 + DRAFTS),)) as rig:
        plans = watch_plans(rig)
        assert all(tokens_of(rig.run(ASKS[2:5]))), "all finish without an error"
        assert plans and {view.num_requests for view, _ in plans} == {PADDED}
        assert all(view.query_starts.tolist() == list(range(PADDED + 1)) for view, _ in plans)
        check_drafts(rig.proposals)


def check_drafts(proposals: list[Proposal]) -> None:
    """As unpadded; a batch may have cut its chunks elsewhere and come to other lengths, but not to nothing else."""
    found = [proposal for proposal in proposals if proposal.known in unpadded_drafts()]
    assert len(found) > len(proposals) / 2
    for proposal in found:
        assert proposal.drafts == unpadded_drafts()[proposal.known]


def stream_asks() -> list[Ask]:
    """32 requests of all sorts: in the language and not, greedy and sampled, of one token to several windows."""
    rng = Random(3)
    prompts = trained_prompts(8, tuple(rng.choice((2, 7, 15, 16, 18, 31, 34, 49)) for _ in range(24)))
    prompts += [prompt_of(100 + i, rng.randint(1, 40), vocab=80) for i in range(8)]
    rng.shuffle(prompts)
    asks = []
    for index, prompt in enumerate(prompts):
        sampled = SamplingParams(temperature=0.8, seed=index, max_tokens=rng.randint(4, 16))
        asks.append(Ask(prompt, sampled if index % 4 == 3 else greedy(rng.randint(4, 16))))
    return asks


def arrive_at_random(rig: Rig, asks: list[Ask], rate: float) -> list[list[int]]:
    """Requests come while others run, at most eight at a time, and all of them finish."""
    rng, tokens, waiting, running = Random(4), {}, list(enumerate(asks)), set()
    for _ in range(3000):
        while waiting and len(running) < 8 and rng.random() < rate:
            index, ask = waiting.pop(0)
            rig.outputs.add(str(index), ask.prompt, ask.params)
            running.add(str(index))
        for output in rig.outputs.step() if rig.engine.has_work else ():
            if output.finished:
                assert output.outputs[0].error is None
                tokens[output.request_id] = output.outputs[0].token_ids
                running.remove(output.request_id)
        if not waiting and not running:
            break
    while rig.engine.has_work:
        rig.engine.step()
    rig.assert_clean()
    return [tokens[str(index)] for index in range(len(asks))]


def test_f1_eight_streams_of_32_requests_twice_over() -> None:
    asks = stream_asks()
    with Rig(trained_target(), max_num_seqs=1, enable_prefix_caching=False, overlap=False, max_model_len=128) as rig:
        expected = [output.outputs[0].token_ids for output in rig.run_one_by_one(asks)]
    with trained_rig(overlap=True, pad_requests=(2, 4, 8), pad_tokens=(8, 16, 32), max_num_batched_tokens=40) as rig:
        for rate in (0.4, 0.9):
            assert arrive_at_random(rig, asks, rate) == expected
        assert rig.scheduler.stats.max_steps_in_flight == 2 and rig.runner.num_padded_steps > 0
        assert {batch.num_requests for batch in rig.batches} == set(range(1, 9)), "every actual size"
        assert accepted_counts(rig) == set(range(DRAFTS + 1))
