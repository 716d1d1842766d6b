"""`outrider verify`: it passes where it should, every condition occurs, and it tells a near-tie from a fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import cli
from outrider.commands import compare, verify
from outrider.commands.compare import describe, differences, explain
from outrider.commands.loading import Loaded
from outrider.commands.run_prompts import Ask
from outrider.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.kernels import ops, step
from outrider.layers import StepContext
from tests.engine.harness import CONFIGS, byte_tokenizer, greedy, save_folder, tiny_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
CONFIG = EngineConfig("tiny", page_size=16, speculative_config=NGRAM)


def loaded(dtype: torch.dtype = torch.float64) -> Loaded:
    return Loaded("tiny", tiny_model("llama", dtype), None, ())


def checked(max_tokens: int = 12) -> verify.Check:
    model = loaded()
    check = verify.Check(model, CONFIG, verify.make_asks(model, quick=True, max_tokens=max_tokens, seed=0))
    check.run_reference()
    return check


def test_every_way_is_tried_and_gives_the_same_tokens() -> None:
    check = checked(max_tokens=20)
    rows = [check.run(way) for way in verify.all_variants(speculative=True)]
    assert [(row.way, row.drafts) for row in rows if not row.is_met] == []
    assert [(row.way, row.detail) for row in rows if row.verdict != "equal"] == []
    assert sum(row.drafts for row in rows) == 8 and any(row.happened["accepted"] for row in rows)


def test_every_tier_is_tried_and_gives_the_same_tokens(tmp_path: Path) -> None:
    check = checked(max_tokens=8)
    rows = [check.run(way) for drafts in (False, True) for way in verify.tier_variants(drafts, str(tmp_path))]
    assert [(row.way, row.missing) for row in rows if not row.is_met] == []
    assert [(row.way, row.detail) for row in rows if row.verdict != "equal"] == []


def test_a_step_that_takes_every_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(sampled: torch.Tensor, bad: torch.Tensor, first_logit: torch.Tensor, drafts: torch.Tensor,
                  num_drafts: torch.Tensor, *rest: Any) -> Any:
        sampled = sampled.clone()
        for first, own, count in zip(first_logit.tolist(), drafts, num_drafts.tolist(), strict=True):
            sampled[first : first + count] = own[:count]
        return true_accept(sampled, bad, first_logit, drafts, num_drafts, *rest)

    check = checked()
    true_accept = step.accept
    monkeypatch.setattr(step, "accept", credulous)
    with ops.using("reference", ops.commit_step):  # the native code does not call it
        row = check.run(verify.Variant("batched", drafts=True, expects=("drafts",)))
    assert row.verdict == "fault" and row.equal < row.requests and "a fault" in row.detail
    assert "output token" in row.detail and "scores of the two tokens" in row.detail


@pytest.mark.parametrize(("size", "verdict"), [(2e-4, "near-tie"), (0.02, "fault")])
def test_a_tie_that_batch_mates_decide(size: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a product does that sums in another order for several rows: two tokens lead, and rows decide between them."""
    model = loaded(torch.float32)
    true_logits = model.model.logits

    def wavering(hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        logits = true_logits(hidden, context)
        logits[:, 10:12] = logits.amax(dim=1, keepdim=True) + 1
        logits[:, 10 if hidden.shape[0] == 1 else 11] += size / 2
        return logits

    monkeypatch.setattr(model.model, "logits", wavering)
    check = verify.Check(model, EngineConfig("tiny", page_size=16), [Ask([5 + i, 6, 7], greedy(6)) for i in range(4)])
    check.run_reference()
    row = check.run(verify.Variant("batched"))
    assert (row.verdict, row.equal) == (verdict, 0) and "reference 10, here 11" in row.detail


SCORES = {3: -1.0, 4: -1.0004, 5: -3.0}
ASK = Ask([1, 2], greedy(8))


def test_what_counts_as_a_near_tie() -> None:
    found = explain(0, 4, ASK, (3, 4), SCORES, "float32")
    assert found.is_near_tie and found.apart == pytest.approx(4e-4, rel=0.01)
    assert "a near-tie" in describe(found, byte_tokenizer()) and "output token 4" in describe(found, None)
    assert explain(0, 4, ASK, (4, 3), SCORES, "float32").is_near_tie, "whoever had the greater"
    assert not explain(0, 4, ASK, (3, 4), SCORES, "float64").is_near_tie
    for dtype in ("float32", "float16", "bfloat16"):
        assert not explain(0, 4, ASK, (3, 5), SCORES, dtype).is_near_tie, "a token that was far behind"


def test_a_run_that_ended_without_a_token_is_a_fault() -> None:
    ended = explain(0, 4, ASK, (3, None), SCORES, "float32")
    assert not ended.is_near_tie and "had ended" in describe(ended, None)
    assert differences([[1, 2], [3, 4], [5, 6]], [[1, 7], [3, 4], [5]]) == [(0, 1), (2, 1)]


def test_scores_of_sampled_requests_include_their_noise() -> None:
    """The winner has the greatest score, which the log-probabilities alone would not give."""
    model = loaded()
    params = SamplingParams(temperature=2.0, seed=11, max_tokens=10)
    ask = Ask([9, 8, 7], params)
    check = verify.Check(model, CONFIG, [ask, Ask([4, 4, 4, 4], params)])
    check.run_reference()
    surprises = 0
    for position, token in enumerate(check.reference[0]):
        before = check._before(0, position)
        check._score([before])
        logprobs = check._scores[before]
        assert len(logprobs) == model.model.vocab_size
        tokens = list(logprobs)
        noise = dict(zip(tokens, compare.noise_of(ask, 3 + position, tokens), strict=True))
        assert max(tokens, key=lambda t: logprobs[t] / 2.0 + noise[t]) == token
        surprises += max(logprobs, key=logprobs.__getitem__) != token
    assert surprises > 2


def test_one_fault_among_near_ties_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request that differs counts, not only the first."""
    model = loaded(torch.float32)
    true_logits = model.model.logits
    lead = [1e-4, 5.0]  # of token 10 before token 11, by request; batch mates reverse it

    def wavering(hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        logits = true_logits(hidden, context)
        logits[:, 10:12] = logits.amax(dim=1, keepdim=True) + 1
        is_alone = hidden.shape[0] == 1
        own = lead[:1] if is_alone and asked["now"] == 0 else lead[1:] if is_alone else lead
        logits[:, 10 if is_alone else 11] += torch.tensor(own)
        return logits

    asked = {"now": 0}
    score = verify.Check._score

    def scored(self: verify.Check, prompts: Any) -> None:
        for prompt in prompts:
            asked["now"] = int(prompt[0] != 5)
            score(self, [prompt])

    monkeypatch.setattr(model.model, "logits", wavering)
    monkeypatch.setattr(verify.Check, "_score", scored)
    asks = [Ask([5, 6, 7], greedy(2)), Ask([8, 6, 7], greedy(2))]
    check = verify.Check(model, EngineConfig("tiny", page_size=16), asks)
    check.reference = [[10, 10], [10, 10]]
    row = check.run(verify.Variant("batched"))
    assert (row.verdict, row.equal) == ("fault", 0) and "request 1" in row.detail


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("model"), CONFIGS["llama"] | {"vocab_size": 260,
                                                                             "max_position_embeddings": 1024})
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def test_rows_are_printed_as_they_come(folder: Path, capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "all_variants", lambda speculative: [verify.Variant("batched"), verify.Variant("more")])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    true_run, seen = verify.Check.run, []

    def run(check: verify.Check, variant: verify.Variant) -> verify.Row:
        captured = capsys.readouterr()
        seen.append((captured.out, captured.err))
        return true_run(check, variant)

    monkeypatch.setattr(verify.Check, "run", run)
    assert cli.main(["verify", str(folder), "--quick"]) == 0
    (before, first), (between, second) = seen
    assert before.startswith("run ") and "the reference, 6 requests" in first and "run 1 of 2: batched ..." in first
    assert between.startswith("batched ") and "run 2 of 2: more ..." in second
    assert capsys.readouterr().out.startswith("more ")


def test_what_a_run_did_not_try_is_named(folder: Path, capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [verify.Variant("batched", expects=("batch mates",)), verify.Variant("calm", expects=("preemptions",))]
    monkeypatch.setattr(verify, "all_variants", lambda speculative: variants)
    assert cli.main(["verify", str(folder), "--quick"]) == 0
    text = capsys.readouterr().out
    assert text.count("NOT TRIED") == 1 and "(NOT TRIED: no preemptions)" in text
    assert "2 of 2 runs give the reference's tokens; 1 of them without preemptions, which they" in text


def test_the_command_prints_a_table_and_sets_the_status(folder: Path, capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "the same beginning of two prompts, which are "
    monkeypatch.setattr(verify, "PROMPTS", [shared + "long", shared + "not short", "abcabcabcabc"])
    command = ["verify", str(folder), "--quick", "--dtype", "float64", "--speculative-config", json.dumps(NGRAM)]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "all of these + drafts" in text and "10 of 10 runs give the reference's tokens" in text
    # As if the first request had taken the tokens of the second.
    monkeypatch.setattr(verify, "differences", lambda reference, tokens: [(0, 3)])
    true_explain = verify.explain
    monkeypatch.setattr(verify, "explain", lambda i, at, ask, pair, scores, dtype: true_explain(
        i, at, ask, (pair[0], min(scores, key=scores.__getitem__)), scores, dtype))
    monkeypatch.setattr(verify, "all_variants", lambda speculative: [verify.Variant("batched")])
    assert cli.main(command) == 1
    out, err = capsys.readouterr()
    assert "1 FAULTS" in out and "tolerance 1e-09: a fault" in out and err.startswith("outrider: error: ")
    assert cli.main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_synthetic_acceptance_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = NGRAM | {"rejection_sample_method": "synthetic"}
    assert cli.main(["verify", str(folder), "--speculative-config", json.dumps(spec)]) == 2
    assert "nothing to verify" in capsys.readouterr().err
