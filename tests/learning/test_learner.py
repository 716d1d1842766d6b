"""A head that learns while it serves: it gets better on the traffic, the text stays, and failures of its trainer harm
nothing."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.config import EngineConfig
from outrider.core import ScheduledBatch
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.start import start_engine
from outrider.features.learning import learner as learner_module
from outrider.features.learning.candidate import Candidate
from outrider.features.learning.learner import IDLE_SECONDS, LEAST_GAIN, MOST_FAILURES, ROUND_STEPS, DrafterLearner
from outrider.features.learning.report import AdaptationReport
from outrider.features.learning.served_head import ServedHead
from outrider.features.learning.traffic import ServedText
from outrider.layers import Linear, RMSNorm, find_modules
from outrider.layers.fuse import prepare
from outrider.runner.worker import Worker
from outrider.server.metrics import ServerMetrics
from tests.drafters.test_matrix import CONDITIONS, PARAMS
from tests.drafters.trained_heads import mean_run
from tests.engine.harness import Ask, Rig, greedy, tokens_of
from tests.learning.rigs import (
    ASSETS,
    NUM_DRAFTS,
    SETTINGS,
    SPECULATIVE,
    learner_of,
    learning_rig,
    naive_aux_states,
    prompts,
    report_of,
    shifted_prompts,
    target,
    without_thread,
)

FLOAT32 = torch.float32


def serve(rig: Rig, asked: list[list[int]], max_tokens: int = 40) -> list[RequestOutput]:
    """In batches of 16."""
    asks = [Ask(prompt, greedy(max_tokens, ignore_eos=True)) for prompt in asked]
    return [output for start in range(0, len(asks), 16) for output in rig.run(asks[start : start + 16])]


def plain_tokens(asked: list[list[int]], max_tokens: int = 40) -> list[list[list[int]]]:
    with Rig(target(FLOAT32), **SETTINGS | {"speculative_config": None, "adapt_drafter": False}) as rig:
        return tokens_of(serve(rig, asked, max_tokens))


def test_the_mean_run_grows_on_shifted_prompts_and_the_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    without_thread(monkeypatch)
    unseen = shifted_prompts(16, seed=1)
    with learning_rig(target(FLOAT32)) as rig:
        before = serve(rig, unseen, 24)
        learner_of(rig).ring.clear()  # what was just served is measured with, and not learned from
        serve(rig, shifted_prompts(32, seed=2), 24)
        serve(rig, [[1, 2, 3]], 1)
        for _ in range(2):
            learner_of(rig)._try_round()
        after = serve(rig, unseen, 24)
        report = report_of(rig.engine)
        assert report is not None and report.num_swaps > 0 and report.num_steps == 20 and report.num_errors == 0
        assert report.candidate_run > report.serving_run > 1 and report.num_texts >= 32
    assert mean_run(after) >= mean_run(before) + 0.15, (mean_run(before), mean_run(after))
    assert tokens_of(after) == tokens_of(before) == plain_tokens(unseen, 24)


def test_the_head_in_training_drafts_as_the_serving_head_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights by name, its rope, its vocabulary: every proposal of the engine, from naive residual streams."""
    without_thread(monkeypatch)
    with learning_rig() as rig:
        rig.run([Ask(prompt, greedy(12)) for prompt in prompts(6, seed=3)])
        candidate, wrong = learner_of(rig)._candidate, 0
        for proposal in rig.proposals:
            text = [*proposal.known, *proposal.drafts]
            served = ServedText(torch.tensor(text), naive_aux_states(text), len(proposal.known))
            for is_serving in (True, False):
                places, accepted = candidate.measure([served], is_serving=is_serving)
                assert places == 1
                wrong += accepted != NUM_DRAFTS
        assert len(rig.proposals) > 15 and wrong <= 0.02 * 2 * len(rig.proposals)  # near-ties: it computes in float32


def test_products_read_the_weights_of_a_swap_and_stay_as_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a product may read a second copy of its weight, in bfloat16 if that holds the weight's numbers."""
    without_thread(monkeypatch)
    with learning_rig(target(FLOAT32)) as rig:
        served = learner_of(rig).served
        for slot in served.slots.values():
            slot.target.copy_(slot.target.bfloat16())
        linears = find_modules([served.head], Linear)
        prepared = prepare([served.head], allow_copies=True)
        served = ServedHead(served.head, NUM_DRAFTS, allow_copies=True)
        served.take({name: torch.randn(slot.shape) for name, slot in served.slots.items()})
        for linear in linears:
            x = torch.randn(3, linear.in_features)
            product, wanted = linear.format.product(x), x @ linear.format.dense().T  # type: ignore[union-attr]
            torch.testing.assert_close(product, wanted, rtol=1e-5, atol=1e-4)  # sums of hundreds, in any order
        assert prepare([served.head], allow_copies=True) == prepared


QUICK = {("sampled", "chunks"), ("greedy", "overlap"), ("all", "padded")}
CELLS = [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.long) for cell in product(PARAMS, CONDITIONS)]


class SwapAtEveryStep(DrafterLearner):
    """Between any two steps the serving head gets other weights, sometimes harmful ones."""

    def begin(self, batch: ScheduledBatch) -> None:
        generator = torch.Generator().manual_seed(self.report.num_swaps)
        for weight in self._candidate.weights.values():
            weight.data += 0.02 * torch.randn(weight.shape, generator=generator)
        self._offer.set()
        super().begin(batch)


@pytest.mark.parametrize(("kind", "condition"), CELLS)
def test_tokens_do_not_depend_on_swaps(kind: str, condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.features.learning.learner.DrafterLearner", SwapAtEveryStep)
    without_thread(monkeypatch)
    options = {"max_num_seqs": 8, **CONDITIONS[condition]}
    asks = [Ask(prompt, SamplingParams(max_tokens=16, ignore_eos=True, **PARAMS[kind]))
            for prompt in [*prompts(4, seed=4), prompts(1, seed=9)[0] * 5]]
    with Rig(target(), **SETTINGS | options | {"speculative_config": None, "adapt_drafter": False}) as rig:
        expected = tokens_of(rig.run(asks))
    with learning_rig(**options) as rig:
        first = rig.run(asks, after_step=rig.preempt if condition == "overlap" else None)
        again = rig.run(asks)
        assert tokens_of(first) == tokens_of(again) == expected
        report = report_of(rig.engine)
        assert report is not None and report.num_swaps > 5 and report.num_errors == 0
        stats = rig.engine.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert (rig.runner.num_padded_steps > 0) == (condition == "padded")
        assert (rig.scheduler.stats.num_preemptions > 0) == (condition == "overlap")
        assert (sum(output.metrics.num_cached_tokens for output in again) > 0) == (condition != "no prefix cache")


def raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def not_finite(candidate: Candidate, *_: object) -> None:
    for weight in candidate.weights.values():
        assert weight.grad is not None
        weight.grad.fill_(float("nan"))


def test_a_copy_that_cannot_begin_again_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer tries again, and ends after as many failures as it may have, instead of at the first one."""
    without_thread(monkeypatch)
    with learning_rig(target(FLOAT32)) as rig:
        learner = learner_of(rig)
        serve(rig, prompts(16, seed=5), 8)
        serve(rig, prompts(1, seed=5), 1)
        with monkeypatch.context() as broken:
            broken.setattr(Candidate, "add_gradients", raises(ValueError("broken")))
            broken.setattr(Candidate, "restart", raises(RuntimeError("broken twice")))
            for _ in range(MOST_FAILURES):
                learner._try_round()
            assert learner._num_failures == learner.report.num_errors == MOST_FAILURES
            with learner.resting():
                learner.forget_model()  # new weights of the target are served, whatever becomes of the copy
        assert learner.report.num_errors == MOST_FAILURES + 1
        assert learner.report.error == "RuntimeError: broken twice"
        serve(rig, prompts(16, seed=5), 8)
        serve(rig, prompts(1, seed=5), 1)
        learner._try_round()
        assert learner._num_failures == 0 and learner.report.num_steps == ROUND_STEPS


@pytest.mark.parametrize("failure", ["raises", *(pytest.param(name, marks=pytest.mark.long)
                                                 for name in ("no memory", "not finite"))])
def test_failures_of_the_trainer_harm_nothing(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread itself fails, again and again, beside requests; then it ends."""
    fail = {"raises": raises(ValueError("broken")), "no memory": raises(torch.OutOfMemoryError("full")),
            "not finite": not_finite}[failure]
    monkeypatch.setattr(Candidate, "add_gradients", fail)
    asked = prompts(16, seed=5)
    expected = plain_tokens(asked, 8)
    with learning_rig(target(FLOAT32)) as rig:
        learner = learner_of(rig)
        healthy = {name: slot.target.clone() for name, slot in learner.served.slots.items()}
        deadline = time.monotonic() + 120
        while learner.report.num_errors < MOST_FAILURES and time.monotonic() < deadline:
            assert tokens_of(serve(rig, asked, 8)) == expected
        assert learner._thread is not None
        learner._thread.join(60)
        assert not learner._thread.is_alive()
        assert tokens_of(serve(rig, asked, 8)) == expected
        report = report_of(rig.engine)
        assert report is not None and report.num_errors == MOST_FAILURES and report.num_swaps == 0 and report.error
        for name, slot in learner.served.slots.items():
            assert torch.equal(slot.target, healthy[name])
            assert torch.equal(learner._candidate.weights[name], slot.target)


def test_a_round_never_measures_with_what_it_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic goes on between the steps of a round, and takes the places of texts that the round has chosen."""
    without_thread(monkeypatch)
    monkeypatch.setattr(learner_module, "SEGMENT_TOKENS", 16)
    trained, measured = set[tuple[int, ...]](), list[tuple[int, ...]]()
    add, apply, measure = Candidate.add_gradients, Candidate.apply, Candidate.measure
    asked = iter(prompts(200, seed=11))

    def adds(self: Candidate, texts: list[ServedText], share: float) -> None:
        trained.update(tuple(text.tokens.tolist()) for text in texts)
        add(self, texts, share)

    def measures(self: Candidate, texts: list[ServedText], *, is_serving: bool) -> tuple[int, int]:
        measured.extend(tuple(text.tokens.tolist()) for text in texts if is_serving)
        return measure(self, texts, is_serving=is_serving)

    with learning_rig(target(FLOAT32), adapt_memory_bytes=24 * 16 * (3 * 96 * 4 + 16)) as rig:
        def applies(self: Candidate) -> None:
            apply(self)
            rig.run([Ask(next(asked), greedy(3, ignore_eos=True)) for _ in range(7)])

        for name, call in (("add_gradients", adds), ("apply", applies), ("measure", measures)):
            monkeypatch.setattr(Candidate, name, call)
        for _ in range(24):
            rig.run([Ask(next(asked), greedy(3, ignore_eos=True))])
        assert learner_of(rig)._train_round()
    assert len(trained) > 12 and len(measured) >= 4 and not trained & set(measured)


def test_weights_are_swapped_for_a_gain_beyond_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_thread(monkeypatch)
    with learning_rig(target(FLOAT32)) as rig:
        learner = learner_of(rig)
        serve(rig, prompts(32, seed=14), 12)
        serve(rig, [[1, 2, 3]], 1)
        texts = [text.segment for text in learner.ring.closed(is_held_out=False)]
        assert learner.ring.num_tokens == sum(segment.num_served for segment in texts), "held-out texts do not count"
        for gain, num_swaps in ((0.5 * LEAST_GAIN, 0), (1.5 * LEAST_GAIN, 1)):
            monkeypatch.setattr(learner, "_measure", lambda chosen, gain=gain: (2.0, 2.0 + gain))
            assert learner._train_round()
            assert learner.report.num_swaps == num_swaps and len(texts) >= 20


def test_new_weights_in_the_middle_of_a_round_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round has read texts of another model: neither its gradients nor its measurement count."""
    without_thread(monkeypatch)
    with learning_rig(target(FLOAT32)) as rig:
        learner, add, added = learner_of(rig), Candidate.add_gradients, []
        serve(rig, prompts(32, seed=12), 12)
        serve(rig, [[1, 2, 3]], 1)

        def adds(self: Candidate, texts: list[ServedText], share: float) -> None:
            add(self, texts, share)
            added.append(len(texts))

        rest = learner._rest

        def forgets(seconds: float) -> None:
            if added and learner.ring.closed(is_held_out=False):
                with learner.resting():
                    learner.forget_model()
            rest(seconds)

        monkeypatch.setattr(Candidate, "add_gradients", adds)
        monkeypatch.setattr(learner, "_rest", forgets)
        learner._try_round()
        report = learner.report
        assert len(added) == 1 and report.num_steps == report.num_errors == report.num_swaps == 0
        for name, slot in learner.served.slots.items():
            assert torch.equal(learner._candidate.weights[name], slot.target.float())
        learner._try_round()
        assert learner.report.num_errors == 0, "with nothing to learn from it waits"


def test_a_failure_while_recording_ends_recording_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(4, seed=6)
    with learning_rig(target(FLOAT32)) as rig:
        learner = learner_of(rig)
        monkeypatch.setattr(learner.ring, "record", raises(RuntimeError("broken")))
        assert tokens_of(serve(rig, asked, 8)) == plain_tokens(asked, 8)
        assert learner.report.num_errors == 1 and not learner._is_recording and rig.engine.stats.num_accepted_tokens > 0


def test_a_step_that_takes_long_does_not_count_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer rests while a step is in flight, and soon after the last one it works without rests."""
    without_thread(monkeypatch)
    with learning_rig() as rig:
        learner = learner_of(rig)
        serve(rig, prompts(2, seed=1), 4)
        now = learner._last_step
        assert learner._is_serving(now) and not learner._is_serving(now + 10 * IDLE_SECONDS)
        learner.begin(ScheduledBatch(0, [], [], [], [], [], [], []))
        learner.begin(ScheduledBatch(0, [], [], [], [], [], [], []))
        learner.end_step()
        assert learner._is_serving(now + 100)
        learner.end_step()
        assert not learner._is_serving(now + 100)
        learner.begin(ScheduledBatch(0, [], [], [], [], [], [], []))
        learner.reset()
        assert not learner._is_serving(now + 100)


def test_the_trainer_rests_for_as_long_as_its_share_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_thread(monkeypatch)
    with learning_rig(adapt_share=0.1) as rig:
        learner, rested = learner_of(rig), []
        monkeypatch.setattr(learner, "_rest", rested.append)
        with learner._at_work():
            time.sleep(0.02)
        (seconds,), worked = rested, learner.report.work_seconds
        assert worked >= 0.02 and seconds == pytest.approx(9 * worked)


@pytest.mark.long
def test_the_thread_learns_beside_requests_and_swaps_between_steps() -> None:
    asked = shifted_prompts(32, seed=7)
    expected, deadline = plain_tokens(asked), time.monotonic() + 240
    with learning_rig(target(FLOAT32)) as rig:
        report = None
        while (report is None or not report.num_swaps) and time.monotonic() < deadline:
            assert tokens_of(serve(rig, asked)) == expected
            report = report_of(rig.engine)
        assert report is not None and report.num_swaps > 0 and report.num_errors == 0
        assert tokens_of(serve(rig, asked)) == expected


@pytest.mark.long
def test_a_worker_in_a_process_of_its_own_reports_what_it_learned() -> None:
    asked, deadline = shifted_prompts(16, seed=7), time.monotonic() + 240
    config = EngineConfig(str(ASSETS / "target"), device="cpu", dtype="float32", skip_tokenizer_init=True, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    with LLM.around(start_engine(config, in_process=True)) as llm:
        report, outputs = None, []
        while (report is None or not report.num_steps) and time.monotonic() < deadline:
            outputs = llm.generate(prompt_token_ids=asked, sampling_params=params, use_tqdm=False)
            report = report_of(llm.engine)
        assert report is not None and report.num_steps > 0 and report.num_errors == 0
        assert [[sample.token_ids for sample in output.outputs] for output in outputs] == plain_tokens(asked)


def test_sleep_pauses_the_trainer_and_new_weights_make_it_forget() -> None:
    settings = SETTINGS | {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    with LLM(str(ASSETS / "target"), **settings) as llm:
        worker = llm.engine.runner
        assert isinstance(worker, Worker)
        (learner,) = worker.device_step.drafting._observers
        assert isinstance(learner, DrafterLearner)
        texts = [llm.generate(prompt_token_ids=prompts(8, seed=8), sampling_params=params, use_tqdm=False)]
        for level in (1, 2):
            llm.sleep(level)
            assert learner._is_paused and learner._working.locked()
            llm.wake_up()
            assert not learner._is_paused
            texts.append(llm.generate(prompt_token_ids=prompts(8, seed=8), sampling_params=params, use_tqdm=False))
        said = [[output.outputs[0].token_ids for output in outputs] for outputs in texts]
        assert said[0] == said[1] == said[2] and learner.ring.num_texts >= 16
        weights = {name: slot.target.clone() for name, slot in worker.device_step.model.weights().items()}
        llm.update_weights(list(weights.items()))
        assert not learner._is_paused
        assert not learner.ring.closed(is_held_out=False) and not learner.ring.closed(is_held_out=True)
    assert learner._thread is None  # it has ended with the engine


@pytest.mark.parametrize(("settings", "word"), [
    ({"speculative_config": None}, "none"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "'ngram'"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: use tensor_parallel_size=1"),
])
def test_what_cannot_learn_is_refused_by_the_config(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"adapt_drafter: .*{word}"):
        EngineConfig("tiny", adapt_drafter=True, **{"speculative_config": SPECULATIVE, **settings})


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"adapt_memory_bytes=100000 holds .* at least \d+"):
        learning_rig(adapt_memory_bytes=100_000)


@pytest.mark.parametrize(("name", "value", "word"), [
    ("has_head_norm", True, "norms of q and k"),
    ("input_norm", RMSNorm(288, 1e-5, dtype=torch.float64, device=torch.device("cpu")), "norm_before_fc"),
    ("attention_layers", [], "several layers"),
])
def test_a_head_of_another_form_is_refused_by_name(name: str, value: object, word: str) -> None:
    with Rig(target(), **SETTINGS | {"adapt_drafter": False}) as rig:
        head = rig.step.drafter.network  # type: ignore[union-attr]
        other = type("Other", (type(head),), {name: value})
        changed = copy.copy(head)
        changed.__dict__.pop(name, None)
        changed.__class__ = other
        with pytest.raises(ValueError, match=f"adapt_drafter: .*{word}.*train-drafter"):
            ServedHead(changed, NUM_DRAFTS, allow_copies=False)


def test_another_drafter_is_refused_by_the_worker() -> None:
    with pytest.raises(ValueError, match="only EAGLE-3 heads learn .* ngram"):
        ServedHead.from_drafter(NgramDrafter(2, min_n=1, max_n=2), allow_copies=False)


def test_the_servers_metrics_tell_what_was_learned() -> None:
    with Rig(target(), **SETTINGS | {"adapt_drafter": False}) as rig:
        metrics = ServerMetrics("tiny")
        assert "adapt_" not in metrics.text(rig.engine, 0)
        rig.engine.reports[AdaptationReport] = AdaptationReport(5, 4, 3, 2, 1.5, 2.5, 0.25)
        text = metrics.text(rig.engine, 0)
    for name, value in (("texts_total", 5), ("steps_total", 4), ("swaps_total", 3), ("errors_total", 2),
                        ("serving_mean_run", 1.5), ("candidate_mean_run", 2.5), ("work_seconds_total", "0.250")):
        assert re.search(rf"^vllm:adapt_{name}{{.*}} {value}$", text, re.MULTILINE), name


def test_batches_tell_which_rows_requests_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    without_thread(monkeypatch)
    with learning_rig() as rig:
        serve(rig, prompts(3, seed=2), 6)
        serve(rig, prompts(1, seed=3), 1)
        ends = [end for batch in rig.batches for end in batch.drafting.ends]
        assert len(ends) == 3 and {end.row for end in ends} == set(rig.batches[0].rows)
