"""`outrider verify`: it passes where it should, every condition occurs, and it tells a near-tie from a fault."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import cli
from outrider.commands import compare, verify
from outrider.commands.compare import Recorder, describe, explain, first_difference
from outrider.commands.drive import Ask
from outrider.commands.loading import Loaded
from outrider.config import EngineConfig
from outrider.core import StepResult
from outrider.params import SamplingParams
from outrider.runner import step
from tests.engine import harness
from tests.engine.harness import CONFIGS, CPU, VOCAB, Rig, byte_tokenizer, greedy, prompt_of, save_folder, tiny_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
CONFIG = EngineConfig("tiny", page_size=16, speculative_config=NGRAM)


def loaded(dtype: torch.dtype = torch.float64) -> Loaded:
    return Loaded("tiny", tiny_model("llama", dtype), CPU, None, ())


def checked(max_tokens: int = 12) -> verify.Check:
    model = loaded()
    check = verify.Check(model, CONFIG, verify.make_asks(model, quick=True, max_tokens=max_tokens, seed=0))
    check.run_reference()
    return check


def test_every_way_is_tried_and_gives_the_same_tokens() -> None:
    check = checked(max_tokens=20)
    rows = [check.run(way) for way in verify.all_ways(speculative=True)]
    assert [(row.way, row.drafts) for row in rows if not row.is_met] == []
    assert [(row.way, row.detail) for row in rows if row.verdict != "equal"] == []
    assert sum(row.drafts for row in rows) == 8 and any(row.happened["accepted"] for row in rows)


def test_a_step_that_takes_every_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(sampled: torch.Tensor, logit_rows: Any, drafts: torch.Tensor, *rest: Any, **options: Any) -> Any:
        width = drafts.shape[1]
        if width:
            own = drafts[logit_rows.request, logit_rows.draft_index.clamp_max(width - 1)]
            sampled = torch.where(logit_rows.draft_index < width, own, sampled)
        return true_accept(sampled, logit_rows, drafts, *rest, **options)

    check = checked()
    true_accept = step.accept
    monkeypatch.setattr(step, "accept", credulous)
    row = check.run(verify.Way("batched", drafts=True, expects=("drafts",)))
    assert row.verdict == "fault" and row.equal < row.requests and "a fault" in row.detail
    assert "output token" in row.detail and "scores of the two tokens" in row.detail


@pytest.mark.parametrize(("size", "verdict"), [(2e-4, "near-tie"), (0.02, "fault")])
def test_a_tie_that_batch_mates_decide(size: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a product does that sums in another order for several rows: two tokens lead, and rows decide between them."""
    model = loaded(torch.float32)
    true_logits = model.model.logits

    def wavering(hidden: torch.Tensor) -> torch.Tensor:
        logits = true_logits(hidden)
        logits[:, 10:12] = logits.amax(dim=1, keepdim=True) + 1
        logits[:, 10 if hidden.shape[0] == 1 else 11] += size / 2
        return logits

    monkeypatch.setattr(model.model, "logits", wavering)
    check = verify.Check(model, EngineConfig("tiny", page_size=16), [Ask([5 + i, 6, 7], greedy(6)) for i in range(4)])
    check.run_reference()
    row = check.run(verify.Way("batched"))
    assert (row.verdict, row.equal) == (verdict, 0) and "reference 10, here 11" in row.detail


def recorded(token: int | None, logprobs: dict[int, float]) -> Recorder:
    recorder = Recorder(None, 0, 0)  # type: ignore[arg-type]
    recorder.token, recorder.logprobs = token, logprobs
    return recorder


ONE = {3: -1.0, 4: -1.0004, 5: -3.0, 6: -4.0, 7: -5.0}
ASK = Ask([1, 2], greedy(8))


def test_what_counts_as_a_near_tie() -> None:
    flipped = {3: -1.0004, 4: -1.0, 5: -3.0, 6: -4.0, 7: -5.0}
    found = explain(0, 4, ASK, recorded(3, ONE), recorded(4, flipped), "float32")
    assert found.is_near_tie and found.largest == pytest.approx(4e-4, rel=0.01)
    assert "a near-tie" in describe(found, byte_tokenizer()) and "output token 4" in describe(found, None)
    assert not explain(0, 4, ASK, recorded(3, ONE), recorded(4, flipped), "float64").is_near_tie
    # The two tokens are as near, but another logit of the step moved.
    moved = flipped | {6: -4.01}
    assert not explain(0, 4, ASK, recorded(3, ONE), recorded(4, moved), "float32").is_near_tie
    assert explain(0, 4, ASK, recorded(3, ONE), recorded(4, moved), "bfloat16").is_near_tie
    # The runs agree about the step, and one of them took a token that was far behind.
    assert not explain(0, 4, ASK, recorded(3, ONE), recorded(5, ONE), "float32").is_near_tie
    # All logits moved alike: no choice depends on that.
    shifted = {token: value + 0.5 for token, value in flipped.items()}
    assert explain(0, 4, ASK, recorded(3, ONE), recorded(4, shifted), "float32").is_near_tie


def test_a_run_that_ended_or_did_not_come_again_is_a_fault() -> None:
    ended = explain(0, 4, ASK, recorded(3, ONE), recorded(None, {}), "float32")
    again = explain(0, 4, ASK, recorded(3, ONE), recorded(3, ONE), "float32")
    assert not ended.is_near_tie and "had ended" in describe(ended, None)
    assert not again.is_near_tie and "did not come again" in describe(again, None)
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3]]) == (1, 1)
    assert first_difference([[1, 2]], [[1, 2]]) is None


def test_scores_of_sampled_requests_include_their_noise() -> None:
    """The recorded step's winner has the greatest score, which the log-probabilities alone would not give."""
    model = loaded()
    params = SamplingParams(temperature=2.0, seed=11, max_tokens=10)
    check = verify.Check(model, CONFIG, [Ask([9, 8, 7], params), Ask([4, 4, 4, 4], params)])
    check.run_reference()
    surprises = 0
    for position, token in enumerate(check.reference[0]):
        recorder = check._scores(verify.Way("batched", drafts=True), 0, position)
        assert recorder.token == token and len(recorder.logprobs) == model.model.vocab_size
        ask = Ask([9, 8, 7], params)
        tokens = list(recorder.logprobs)
        noise = dict(zip(tokens, compare.noise_of(ask, 3 + position, tokens), strict=True))
        best = max(tokens, key=lambda t: recorder.logprobs[t] / 2.0 + noise[t])
        assert best == token
        surprises += max(recorder.logprobs, key=recorder.logprobs.__getitem__) != token
    assert surprises > 2


def test_scores_of_preempted_requests_are_found() -> None:
    check = checked(max_tokens=24)
    tight = next(way for way in verify.all_ways(True) if way.name == "small pool")
    for index in (0, 5):
        recorder = check._scores(tight, index, 20)
        assert recorder.token == check.reference[index][20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("model"), CONFIGS["llama"] | {"vocab_size": 260,
                                                                             "max_position_embeddings": 1024})
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def test_the_command_prints_a_table_and_sets_the_status(folder: Path, capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "the same beginning of two prompts, which are "
    monkeypatch.setattr(verify, "PROMPTS", [shared + "long", shared + "not short", "abcabcabcabc"])
    command = ["verify", str(folder), "--quick", "--dtype", "float64", "--speculative-config", json.dumps(NGRAM)]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "all of these + drafts" in text and "10 of 10 runs give the reference's tokens" in text
    monkeypatch.setattr(verify, "first_difference", lambda reference, tokens: (0, 3))
    monkeypatch.setattr(verify, "all_ways", lambda speculative: [verify.Way("batched")])
    assert cli.main(command) == 1
    out, err = capsys.readouterr()
    assert "1 FAULTS" in out and "did not come again" in out and err.startswith("outrider: error: ")
    assert cli.main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_synthetic_acceptance_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = NGRAM | {"rejection_sample_method": "synthetic"}
    assert cli.main(["verify", str(folder), "--speculative-config", json.dumps(spec)]) == 2
    assert "nothing to verify" in capsys.readouterr().err


def test_scores_are_recorded_where_a_result_comes_only_when_it_is_asked_for() -> None:
    """As on CUDA: nothing calls back when a step is done."""

    class Late(Future[StepResult]):
        def __init__(self, inner: Future[StepResult]) -> None:
            super().__init__()
            self._inner = inner

        def result(self, timeout: float | None = None) -> StepResult:
            return self._inner.result(timeout)

    with Rig(tiny_model("llama"), poison=False) as rig:
        submit = rig.runner.submit
        rig.runner.submit = lambda batch: Late(submit(batch))  # type: ignore[method-assign]
        prompt = prompt_of(1, 9)
        recorder = rig.engine.runner = Recorder(rig.runner, 0, len(prompt) + 3)
        (output,) = rig.run([harness.Ask(prompt, greedy(6, logprobs=-1))])
        assert recorder.token == output.outputs[0].token_ids[3] and len(recorder.logprobs) == VOCAB
