"""Several drafters: each request gets the drafts of the one that is right more often for it, and the text does not
depend on which. Finished outputs are kept within bounds, and only for requests of the same tenant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core import Limits
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.drafters.choice import ProposalChoice, _Grades
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.suffix import MAX_SIBLINGS, SuffixDrafter
from outrider.kernels.step import Proposal
from outrider.speculation.draft_sources import DraftSources
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import Ask, Rig, add_request, prompt_of, tiny_model, tokens_of

K = 3
PROMPTS = [prompt_of(seed, 12 + seed) for seed in range(4)]
CONFIG = {"method": "ngram", "num_speculative_tokens": K, "auto": False}


def asks(**params: Any) -> list[Ask]:
    return [Ask(prompt, SamplingParams(max_tokens=24, ignore_eos=True, **params)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def truth() -> dict[tuple[int, ...], list[int]]:
    with Rig(tiny_model("llama")) as rig:
        return {tuple(ask.prompt): run[0] for ask, run in zip(asks(temperature=0), tokens_of(rig.run(
            asks(temperature=0))), strict=True)}


def scripted(truth: dict[tuple[int, ...], list[int]], right_for: list[int]) -> ScriptedDrafter:
    """Drafts the true tokens for some of the prompts, and wrong ones for the others."""

    def script(prompt: tuple[int, ...], index: int) -> list[int]:
        is_right = PROMPTS.index(list(prompt)) in right_for
        return [token if is_right else (token + 1) % 256 for token in truth[prompt]]

    return ScriptedDrafter(K, script)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_request_gets_the_drafter_that_is_right_for_it(truth: dict[tuple[int, ...], list[int]],
                                                            overlap: bool) -> None:
    """Taken in order, the first drafter would always have drafts, right ones for half of the requests."""
    pair = CombinedDrafter([scripted(truth, [0, 1]), scripted(truth, [2, 3])])
    with Rig(tiny_model("llama"), drafter=pair, speculative_config=CONFIG, overlap=overlap) as rig:
        outputs = rig.run(asks(temperature=0))
        assert [run[0] for run in tokens_of(outputs)] == list(truth.values())
        shares = [output.metrics.num_accepted_tokens / output.metrics.num_draft_tokens for output in outputs]
        assert min(shares[:2]) == 1.0 and min(shares[2:]) > 0.5, shares


def test_what_is_learned_ends_with_the_request(truth: dict[tuple[int, ...], list[int]]) -> None:
    """A row's next owner begins anew: the first drafter comes first among equals."""
    pair = CombinedDrafter([scripted(truth, [0]), scripted(truth, [3])])
    with Rig(tiny_model("llama"), drafter=pair, speculative_config=CONFIG, max_num_seqs=1) as rig:
        for index in (3, 0, 3, 0):
            (output,) = rig.run([asks(temperature=0)[index]])
            first = output.metrics.num_draft_tokens - output.metrics.num_accepted_tokens
            assert (first > 0) == (index == 3), "the first step has drafts of the first drafter"


class Wrong(Drafter):
    """Offers token ids outside of the vocabulary."""

    name, max_drafts = "wrong", K

    def propose(self, step: Step) -> Drafts:
        rows = step.batch.padded.rows
        return Drafts(torch.full((len(rows), step.num_wanted), 999), torch.full_like(rows, step.num_wanted))


def test_a_wrong_proposal_is_reported_and_the_other_drafter_is_taken(truth: dict[tuple[int, ...], list[int]]) -> None:
    pair = CombinedDrafter([Wrong(), scripted(truth, [0, 1, 2, 3])])
    with Rig(tiny_model("llama"), drafter=pair, speculative_config=CONFIG, expects_faults=True) as rig:
        outputs = rig.run(asks(temperature=0))
        assert [run[0] for run in tokens_of(outputs)] == list(truth.values())
        assert all(o.metrics.num_accepted_tokens == o.metrics.num_draft_tokens > 0 for o in outputs)
        assert rig.engine.stats.num_drafter_faults > 0


# The host drafter beside those of the device


def test_the_host_is_preferred_where_its_guesses_were_right() -> None:
    sources = DraftSources(4)
    text = list(range(100, 160))
    for length in range(10, 30):  # guesses of request 1 are right, those of request 2 wrong
        sources.note_guess(1, text[:length], text[length : length + 4], 5)
        sources.note_guess(2, text[:length], [7, 7, 7, 7], 5)
        for request in (1, 2):
            sources.note_device(request, 4, 2)
    assert sources.prefers_host(1, 0, 4) and not sources.prefers_host(2, 0, 4)
    sources.forget(1)
    sources.note_guess(1, text[:10], text[10:14], 5)  # now all requests' rates decide


def test_longer_matches_are_judged_apart() -> None:
    sources, text = DraftSources(4), list(range(200))
    for length in range(10, 150):
        is_long = length % 2
        guess = text[length : length + 4] if is_long else [999] * 4
        sources.note_guess(1, text[:length], guess, 20 if is_long else 3)
        sources.note_device(1, 4, 2)
    sources.note_guess(1, text[:160], text[160:164], 20)
    assert sources.prefers_host(1, 0, 4)
    sources.note_guess(1, text[:161], text[161:165], 3)
    assert not sources.prefers_host(1, 0, 4)


def test_suffixes_beside_a_drafter_on_the_device_leave_the_text(truth: dict[tuple[int, ...], list[int]]) -> None:
    config = {"method": ["suffix", "ngram"], "num_speculative_tokens": K, "auto": False}
    with Rig(tiny_model("llama"), drafter=scripted(truth, [0, 1, 2, 3]), speculative_config=config) as rig:
        for _ in range(3):  # from the second time on suffixes match whole outputs
            outputs = rig.run(asks(temperature=0))
            assert [run[0] for run in tokens_of(outputs)] == list(truth.values())
            drafted = sum(output.metrics.num_draft_tokens for output in outputs)
            assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0.8 * drafted


# The store of finished outputs


def test_outputs_are_matched_by_requests_of_the_same_tenant_alone() -> None:
    drafter, text = SuffixDrafter(), list(range(40))
    drafter.finish(1, text, "a")
    assert drafter.propose(2, text[:10], 5, 4, "a") == text[10:14] and drafter.last_match == 10
    assert drafter.propose(3, text[:10], 5, 4, "b") == [] and drafter.last_match == 0
    assert drafter.propose(4, text[:10], 5, 4, "") == []


def test_running_samples_of_a_prompt_draft_for_each_other() -> None:
    drafter, prompt, answer = SuffixDrafter(), [1, 2, 3, 4], list(range(20, 40))
    assert drafter.propose(1, prompt + answer, 4, 3, "a") == []
    for request_id, tenant, own, wanted in ((2, "a", prompt, answer[6:9]), (3, "b", prompt, []),
                                            (4, "a", [9, *prompt], [])):
        found = drafter.propose(request_id, own + answer[:6], len(own), 3, tenant)
        assert found == wanted, "of this tenant and this prompt alone"
    drafter.propose(1, prompt + answer + [50, 51], 4, 3, "a")
    assert drafter.propose(2, prompt + answer, 4, 3, "a") == [50, 51], "as far as it has come"
    for request_id in (1, 2, 3, 4):
        drafter.finish(request_id, prompt, "a")
    assert drafter._own == {} and drafter._groups == {}, "nothing is left of requests that have ended"


def test_few_of_many_samples_are_searched() -> None:
    drafter, prompt = SuffixDrafter(), [1, 2, 3]
    for sample in range(MAX_SIBLINGS + 2):
        drafter.propose(sample, [*prompt, 10, 11, 12, 100 + sample], 3, 1, "")
    newest = drafter.propose(1000, [*prompt, 10, 11, 12], 3, 1, "")
    assert newest == [100 + MAX_SIBLINGS + 1]
    assert len(list(drafter._siblings(drafter._own[1000]))) == MAX_SIBLINGS


def test_of_equal_matches_the_latest_is_followed() -> None:
    assert SuffixDrafter().propose(0, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 4, 1, "") == [5]


def test_a_text_that_is_too_long_to_keep_pushes_no_other_out() -> None:
    drafter = SuffixDrafter(num_kept=3, max_tokens=10)
    drafter.finish(0, [1, 2, 3, 4, 5], "a")
    drafter.finish(1, list(range(20)), "a")
    assert drafter.num_tokens == 5 and drafter.propose(2, [1, 2, 3], 3, 2, "a") == [4, 5]
    for tenant in range(50):
        drafter.finish(3 + tenant, [tenant] * 6, str(tenant))
    assert list(drafter._kept) == ["49"] and drafter.num_tokens == 6, "nothing is left of tenants without texts"


def test_a_drafter_is_graded_by_the_tokens_that_the_step_yielded() -> None:
    """Drafts behind the end of a run were neither right nor wrong."""
    grades = _Grades(Limits(2, 8, 32, 3, 99), torch.device("cpu"))
    rows = torch.tensor([1])
    for run, right, tried in (([5], 1.0, 1.0), ([5, 6], 2.0, 2.0), ([5, 9], 1.0, 2.0), ([5, 6, 7, 8], 3.0, 3.0)):
        grades.forget(rows)
        grades.keep(rows, torch.tensor([[5, 6, 7]]), torch.tensor([3]))
        padded = torch.tensor([run + [0] * (4 - len(run))])
        grades.grade(rows, padded, torch.tensor([len(run)]))
        assert (float(grades.right[1]), float(grades.tried[1])) == (right, tried), run


@pytest.mark.parametrize("case", ["switched off", "does not go on", "unsound"])
def test_drafts_that_were_not_offered_are_not_graded(case: str) -> None:
    """The request's next token would show that the first drafter was wrong; of equal drafters the first is taken."""
    choice = ProposalChoice(2, Limits(2, 8, 32, 3, 99), torch.device("cpu"))

    def choose(run: list[int], first: list[int], second: list[int], counts: tuple[int, int], *, is_on: int = 1,
               goes_on: bool = True) -> list[int]:
        """The counts that are left of both drafters' proposals."""
        step: Any = SimpleNamespace(
            batch=SimpleNamespace(padded=SimpleNamespace(rows=torch.tensor([1]))), goes_on=torch.tensor([goes_on]),
            accepted=SimpleNamespace(run=torch.tensor([run + [0] * (4 - len(run))]), run_len=torch.tensor([len(run)])))
        proposals = [Proposal(torch.tensor([tokens]), torch.tensor([count]), None)
                     for tokens, count in zip((first, second), counts, strict=True)]
        return [int(own.counts) for own in choice.choose(step, proposals, torch.full((2,), is_on))]

    wrong, right = [9, 9, 9], [5, 6, 7]
    counts = (K + 1, 0) if case == "unsound" else (K, K)
    choose([4], wrong, right, counts, is_on=int(case != "switched off"), goes_on=case != "does not go on")
    assert choose([5], right, right, (K, K)) == [K, 0]
    assert choose([5], wrong, right, (K, K)) == [K, 0] and choose([5], right, right, (K, K)) == [0, K]


def test_a_suffix_drafter_follows_a_match_that_goes_on() -> None:
    """The longest match ends its text, with nothing to propose."""
    drafter = SuffixDrafter()
    drafter.finish(0, [9, 1, 2, 3, 4, 5], "")
    drafter.finish(1, [7, 8, 1, 2, 3], "")
    assert drafter.propose(2, [7, 8, 1, 2, 3], 5, 2, "") == [4, 5] and drafter.last_match == 3


def test_kept_outputs_are_bounded_in_number_and_tokens() -> None:
    drafter = SuffixDrafter(num_kept=3, max_tokens=100)
    for index in range(10):
        drafter.finish(index, [index * 50 + i for i in range(20)], "a")
        assert drafter.num_tokens <= 60
    assert drafter.propose(100, [9 * 50, 9 * 50 + 1, 9 * 50 + 2], 3, 1, "a") == [9 * 50 + 3]
    assert drafter.propose(101, [6 * 50, 6 * 50 + 1, 6 * 50 + 2], 3, 1, "a") == []
    for index in range(10, 20):
        drafter.finish(index, list(range(30)), f"tenant {index}")
        assert drafter.num_tokens <= 100
    drafter.finish(50, list(range(101)), "a")  # longer than all that may be kept
    assert drafter.num_tokens <= 100


def test_a_request_with_a_salt_does_not_show_in_anothers_drafts(truth: dict[tuple[int, ...], list[int]]) -> None:
    with Rig(tiny_model("llama"), speculative_config=CONFIG | {"method": "suffix"}) as rig:
        for salt, accepts in ((None, False), ("x", False), ("x", True), ("y", False), (None, True)):
            add_request(rig.engine, "0", {"prompt_token_ids": PROMPTS[0], "cache_salt": salt},
                        asks(temperature=0)[0].params)
            while rig.engine.has_work:
                rig.engine.step()
            accepted = sum(part.num_accepted for result in rig.results for part in result.requests)
            rig.results.clear()
            assert (accepted > 3) == accepts, (salt, accepted)
