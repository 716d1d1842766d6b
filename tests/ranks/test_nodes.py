"""Ranks on two "machines": two groups of processes at 127.0.0.1 and 127.0.0.2, which share nothing but TCP. Tokens are
those of one rank in float64, and bits in exact mode do not depend on the batch. A rank or a node that is lost is named,
and an engine that is started again has the same nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.hosts import host_link
from outrider.kernels import cpu as native
from outrider.runner.interface import WorkerDied
from tests.engine.harness import prompt_of, save_folder, tokens_of
from tests.ranks.commands import BreakStep, Refuse, RowDigests
from tests.ranks.families import config_of
from tests.ranks.nodes import SECRET, agents, garble, listening_ports, over_nodes, start_front
from tests.ranks.test_engine import ASSETS, END, model_at, process_ids, short_texts_of, started, texts_of, wait_for_end

pytest.importorskip("llguidance")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}


@pytest.fixture(autouse=True)
def own_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OUTRIDER_RANK_TOKEN", SECRET)
    yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_at(tmp_path_factory.mktemp("nodes"))


def test_two_nodes_have_the_tokens_of_one_rank_and_come_back(model: str) -> None:
    with started(model, 1) as llm:
        expected, short = texts_of(llm), short_texts_of(llm)
    settings = over_nodes(2)
    with agents(model, 2, settings) as (agent,):
        with start_front(model, settings) as llm:
            assert texts_of(llm) == expected
            assert llm.engine.stats.num_hit_tokens > 0 and llm.engine.stats.num_accepted_tokens > 0
            first, second = llm.engine.command(RowDigests())
            assert first == second
            llm.sleep()
            llm.wake_up()
            with pytest.raises(ValueError, match="refused by rank 0"):
                llm.engine.command(Refuse(ranks=(0, 1)))
            assert len(process_ids(llm)) == 2
            (remote,) = agent.rank_ids
            assert remote in process_ids(llm)
            open_ports = listening_ports([*process_ids(llm), os.getpid(), agent.process.pid])
            assert open_ports and all(address.startswith("127.") for address, _ in open_ports)
            for address, port in open_ports:
                garble(address, port)
            assert short_texts_of(llm) == short
            llm.engine.command(BreakStep("die", ranks=(1,), countdown=3))
            with pytest.raises(WorkerDied, match=r"rank 1 on node 1 \(127.0.0.2\) died when it ran step \d+ .*SIGKILL"):
                texts_of(llm)
            wait_for_end([*process_ids(llm), remote])
        with start_front(model, settings) as llm:  # the agent has joined again
            assert short_texts_of(llm) == short
            agent.process.kill()
            with pytest.raises(WorkerDied, match=r"node 1 \(127.0.0.2\) with rank 1 is lost: it has ended its conn"):
                while True:
                    texts_of(llm)


def hybrid_at(path: Path) -> str:
    """A tiny Qwen3.5-MoE: gated delta and full attention layers with experts."""
    config = config_of("qwen3_5_moe") | {"vocab_size": 259, "eos_token_id": END}
    return str(save_folder(path / "hybrid", config, seed=3))


def ask(llm: LLM) -> Any:
    prompts = [prompt_of(number, length, 24) for number, length in ((1, 40), (2, 19), (1, 40), (3, 7))]
    params = [SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=20, ignore_eos=True)
              for number in range(4)]
    return [tokens_of(llm.generate(prompts, params, use_tqdm=False)) for _ in range(2)]


@pytest.mark.long
@pytest.mark.parametrize(("asset", "drafts", "num_ranks", "num_nodes"), [
    (None, NGRAM, 2, 2), (None, NGRAM, 4, 2), ("nemotronh", {"method": "mtp"}, 2, 2),
    ("target", {"method": "eagle3", "model": str(ASSETS / "eagle3")}, 4, 4),
])
def test_hybrids_and_drafters_over_nodes(tmp_path: Path, asset: str | None, drafts: dict[str, Any], num_ranks: int,
                                         num_nodes: int) -> None:
    model = hybrid_at(tmp_path) if asset is None else str(ASSETS / asset)
    more = {"num_pages": 64, "speculative_config": {"num_speculative_tokens": 3, "auto": False} | drafts}
    with started(model, 1, **more) as llm:
        expected = ask(llm)
    settings = over_nodes(num_ranks, num_nodes, **more)
    with agents(model, num_nodes, settings), start_front(model, settings) as llm:
        assert ask(llm) == expected
        assert llm.engine.stats.num_draft_tokens > 0 and llm.engine.stats.num_hit_tokens > 0
        assert asset is None or llm.engine.stats.num_accepted_tokens > 0  # texts of random weights hardly repeat
        assert len(set(llm.engine.command(RowDigests()))) == 1


@pytest.mark.long
@pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bits_over_nodes_do_not_depend_on_the_batch(tmp_path: Path, num_ranks: int) -> None:
    model = hybrid_at(tmp_path)
    settings = over_nodes(num_ranks, dtype="float32", exact=True, num_pages=64, enable_prefix_caching=False)
    prompts = [prompt_of(number, 9 + 11 * number) for number in range(4)]
    params = [SamplingParams(temperature=0.7 * (number % 2), seed=number, max_tokens=12, ignore_eos=True, logprobs=3)
              for number in range(4)]

    def bits(outputs: Any) -> list[Any]:
        return [(list(one.outputs[0].token_ids), [sorted((token, own.logprob) for token, own in entry.items())
                                                  for entry in one.outputs[0].logprobs]) for one in outputs]

    with agents(model, 2, settings), start_front(model, settings) as llm:
        alone = [bits(llm.generate([prompt], [own], use_tqdm=False))[0]
                 for prompt, own in zip(prompts, params, strict=True)]
        for order in ([0, 1, 2, 3], [3, 1], [2, 3, 0, 1]):
            together = bits(llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False))
            assert together == [alone[i] for i in order]


@pytest.mark.long
def test_a_node_that_stops_is_named_in_seconds(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "CUT_OFF_SECONDS", 3.0)
    settings = over_nodes(2)
    with agents(model, 2, settings) as (agent,):
        with start_front(model, settings) as llm:
            short = short_texts_of(llm)
            remote = agent.rank_ids
            for pid in (agent.process.pid, *remote):
                os.kill(pid, signal.SIGSTOP)  # sockets stay open
            begin = time.monotonic()
            with pytest.raises(WorkerDied, match=r"node 1 \(127.0.0.2\) with rank 1 is lost: nothing has come from it "
                                                 "for 3 s"):
                texts_of(llm)
            assert time.monotonic() - begin < 60
            for pid in (agent.process.pid, *remote):
                os.kill(pid, signal.SIGCONT)
            wait_for_end(remote)
        with start_front(model, settings) as llm:
            assert short_texts_of(llm) == short


@pytest.mark.long
def test_nodes_end_their_ranks_with_node_0(model: str) -> None:
    settings = over_nodes(4, 2)
    with agents(model, 2, settings) as (agent,):
        with start_front(model, settings) as llm:
            remote = agent.rank_ids
            assert len(remote) == 2
            short_texts_of(llm)
        wait_for_end(remote)
        agent.wait_for("has ended the ranks of node 1")
        with start_front(model, settings) as llm:
            remote = agent.rank_ids
            agent.process.send_signal(signal.SIGINT)
            agent.process.wait(60)
            wait_for_end(remote)
            with pytest.raises(WorkerDied, match="node 1"):
                while True:
                    texts_of(llm)
