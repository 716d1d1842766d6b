"""An engine whose worker has two ranks: the tokens of one rank, the same rows on both, and an end that names a rank.

The quick tests share one engine, since ranks take seconds to start; the last of them ends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, StructuredOutputsParams
from outrider.config import EngineConfig
from outrider.engine.start import start_engine
from outrider.engine.worker_process import WorkerProcess
from outrider.features.grammars import leases
from outrider.runner.interface import WorkerDied
from tests.engine.harness import CONFIGS, byte_tokenizer, greedy, prompt_of, save_folder, tokens_of
from tests.engine.local_compiler import compiler_of
from tests.ranks.commands import BreakStep, FormNumbers, Refuse, RowDigests

pytest.importorskip("llguidance")

ASSETS = Path(__file__).parents[1] / "assets"
END = 257
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "device": "cpu", "max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 24,
    "num_pages": 9, "overlap": True,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False},
}
PROMPTS = [prompt_of(1, 60), prompt_of(2, 6) * 8, [*prompt_of(1, 60)[:48], 7, 8], prompt_of(3, 9)]
FORM = StructuredOutputsParams(regex=r"[a-f]{3,6}-\d{2}")
PARAMS = [greedy(20), SamplingParams(seed=3, max_tokens=20, logprobs=2), greedy(20, stop_token_ids=[9]),
          SamplingParams(seed=4, temperature=0.7, top_k=40, presence_penalty=0.5, max_tokens=20),
          SamplingParams(temperature=0.9, seed=1, max_tokens=12, structured_outputs=FORM)]


def model_at(path: Path) -> str:
    folder = save_folder(path / "tiny", CONFIGS["llama"] | {"vocab_size": 259, "eos_token_id": END}, seed=5)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def started(model: str, num_ranks: int, **settings: Any) -> LLM:
    config = EngineConfig(model, tensor_parallel_size=num_ranks, **SETTINGS | settings)
    return LLM.around(start_engine(config))


def texts_of(llm: LLM) -> list[Any]:
    """Requests that hit the prefixes of others, are preempted, computed in chunks and bound to a form."""
    found: list[Any] = []
    for _ in range(2):
        outputs = llm.generate([*map(list, PROMPTS), prompt_of(4, 5)], PARAMS, use_tqdm=False)
        found.append(tokens_of(outputs))
        found.append([list(entry) for entry in outputs[1].outputs[0].logprobs or []])
    return found


def short_texts_of(llm: LLM) -> Any:
    return tokens_of(llm.generate([list(PROMPTS[1]), prompt_of(5, 9)], [greedy(8), PARAMS[1]], use_tqdm=False))


def process_ids(llm: LLM) -> list[int]:
    assert isinstance(llm.engine.runner, WorkerProcess)
    return [pid for pid in llm.engine.runner.process_ids if pid is not None]


def wait_for_end(pids: list[int]) -> None:
    until = time.monotonic() + 100
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_at(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def two(model: str) -> Iterator[LLM]:
    with started(model, 2) as llm:
        yield llm


def test_two_ranks_give_the_tokens_of_one(two: LLM, model: str) -> None:
    with started(model, 1) as llm:
        expected = texts_of(llm)
    assert texts_of(two) == expected
    stats, scheduler = two.engine.stats, two.engine.scheduler.stats
    assert stats.num_hit_tokens > 0 and stats.num_accepted_tokens > 0 and scheduler.num_preemptions > 0
    first, second = two.engine.command(RowDigests())
    assert first == second


def test_a_step_that_fails_on_both_ranks_is_run_again(two: LLM) -> None:
    before = short_texts_of(two)
    two.engine.command(BreakStep("raise", ranks=(0, 1), countdown=2))
    assert short_texts_of(two) == before
    first, second = two.engine.command(RowDigests())
    assert first == second


def test_both_ranks_sleep_and_wake(two: LLM) -> None:
    before = short_texts_of(two)
    report = two.sleep()
    assert report is None or report.total_bytes > 0
    two.wake_up()
    assert short_texts_of(two) == before


def test_commands_are_answered_by_both_ranks(two: LLM) -> None:
    assert two.engine.command(Refuse(ranks=())) == 1
    with pytest.raises(ValueError, match="refused by rank 0"):
        two.engine.command(Refuse(ranks=(0, 1)))


def test_ranks_keep_the_forms_that_requests_lease(two: LLM, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forms are kept beyond those that are leased. No step compiles one, also after a preemption."""
    monkeypatch.setattr(leases, "NUM_KEPT", 2)
    params = [SamplingParams(temperature=0.9, seed=number, max_tokens=12,
                             structured_outputs=StructuredOutputsParams(regex=f"[a-f]{{3,6}}-{number}"))
              for number in range(6)]
    prompts = [prompt_of(number, 9) for number in range(6)]
    with started(model, 1) as llm:
        expected = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    kept = compiler_of(two.engine).leases._kept
    streams = [two.stream(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    next(streams[0])
    first, second = two.engine.command(FormNumbers(allows_more=False))
    assert first == second == sorted(kept) and len(kept) >= 6
    two._loop.run(two.engine.rest)  # preempts all
    outputs = [list(stream)[-1] for stream in streams]
    assert tokens_of(outputs) == expected and outputs[0].metrics.num_preemptions == 1
    first, second = two.engine.command(FormNumbers(allows_more=True))
    assert first == second == sorted(kept) and len(kept) == 2


def test_a_rank_that_is_killed_in_a_step_ends_requests_by_name(two: LLM) -> None:
    pids = process_ids(two)
    two.engine.command(BreakStep("die", ranks=(1,), countdown=3))
    with pytest.raises(WorkerDied, match=r"rank 1 died when it ran step \d+ .signal SIGKILL."):
        texts_of(two)
    with pytest.raises(WorkerDied, match="rank 1"):
        texts_of(two)
    assert not any(kept.live for kept in compiler_of(two.engine).leases._kept.values())
    wait_for_end(pids)


@pytest.mark.long
@pytest.mark.parametrize(("target", "speculative", "num_ranks"), [
    ("target", {"method": "eagle3", "model": str(ASSETS / "eagle3")}, 2),
    ("target", {"method": ["suffix", "draft_model"], "model": str(ASSETS / "target")}, 4),
    ("nemotronh", {"method": "mtp"}, 2),
    ("deepseek_v32", {"method": "mtp"}, 4),
])
def test_trained_models_with_their_drafters(target: str, speculative: dict[str, Any], num_ranks: int) -> None:
    found = []
    for count in (1, num_ranks):
        settings = {"num_pages": 64, "speculative_config": speculative | {"num_speculative_tokens": 3, "auto": False}}
        with started(str(ASSETS / target), count, **settings) as llm:
            prompts = [prompt_of(number, length, 24) for number, length in ((1, 40), (2, 19), (1, 40), (3, 7))]
            params = [SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=20, ignore_eos=True)
                      for number in range(4)]
            found.append([tokens_of(llm.generate(prompts, params, use_tqdm=False)) for _ in range(2)])
            assert llm.engine.stats.num_accepted_tokens > 0 and llm.engine.stats.num_hit_tokens > 0
            assert len(set(llm.engine.command(RowDigests()))) == 1
    assert found[0] == found[1]
