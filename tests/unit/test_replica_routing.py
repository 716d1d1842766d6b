"""Which replica gets a prompt, what is read of a prompt, and metrics of several replicas on one page."""

from __future__ import annotations

import json
import random
import socket
import sys
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.config import EngineConfig
from outrider.ray import app
from outrider.ray.preflight import NodeNotReady, check_address, check_node, versions_here
from outrider.replicas.joined_metrics import joined_metrics
from outrider.replicas.placement import replica_environments
from outrider.replicas.policy import MOST_BEHIND, PrefixRouter
from outrider.replicas.prompt_blocks import BLOCK_CHARACTERS, MOST_BLOCKS, body_blocks, prompt_blocks
from outrider.server.settings import ServerConfig


def blocks_of(text: str, **more: object) -> list[int]:
    return prompt_blocks({"prompt": text, **more})


def test_the_replica_that_holds_the_longest_beginning_is_preferred_until_it_is_loaded() -> None:
    router = PrefixRouter()
    long, longer = "a" * 640, "a" * 640 + "b" * 640
    router.remember(blocks_of(long), "1")
    router.remember(blocks_of(longer), "2")
    loads = {"0": 0, "1": 2, "2": 3}
    assert router.choose(blocks_of(longer + "more"), loads) == "2"
    assert router.choose(blocks_of(long + "c" * 640), loads) == "1", "the least loaded of those that hold it"
    assert router.choose(blocks_of("z" * 640), loads) == "0" and router.choose([], loads) == "0"
    assert router.choose(blocks_of(longer), loads | {"2": MOST_BEHIND}) == "2"
    assert router.choose(blocks_of(longer), loads | {"2": MOST_BEHIND + 1}) == "0"
    assert router.choose(blocks_of(longer), {"0": 100, "1": 100, "2": 150}) == "2"
    assert router.choose(blocks_of(longer), {"0": 9, "1": 9}) == "1", "only replicas that could take it"


def test_prompts_that_come_one_by_one_fill_the_caches_of_all_replicas() -> None:
    router, idle, given = PrefixRouter(), {name: 0 for name in ("0", "1", "2")}, []
    for i in range(9):
        blocks = blocks_of(f"{i} is new " * 30)
        given.append(router.choose(blocks, idle))
        router.remember(blocks, given[-1])
    assert given == ["0", "1", "2"] * 3
    router.forget("2")
    assert router.choose([], idle) == "2", "a replica that starts again is the next"


def test_a_replica_that_starts_again_holds_nothing_and_memory_is_bounded() -> None:
    router = PrefixRouter(max_blocks=30)
    for i in range(20):
        router.remember(blocks_of(chr(65 + i) * 640), str(i % 2))
        assert len(router) <= 30
    kept = blocks_of(chr(65 + 19) * 640)
    assert router.num_matched(kept, "1") == 10 and router.choose(kept, {"0": 0, "1": 1}) == "1"
    router.forget("1")
    assert router.num_matched(kept, "1") == 0 and router.choose(kept, {"0": 1, "1": 0}) == "1"
    before = blocks_of(chr(65 + 18) * 640)
    assert router.num_matched(before, "0") == 10
    router.remember(blocks_of("long" * 400), "0")
    assert 0 < router.num_matched(before, "0") < 10, "the end of a prompt is forgotten first"


def test_shared_beginnings_hit_nearly_as_often_as_on_one_replica() -> None:
    """64 conversations of 8 turns over 4 replicas: one replica would hit all turns but the first."""
    router, choice = PrefixRouter(), random.Random(0)
    texts = {i: f"conversation {i} " * 40 for i in range(64)}
    waiting, running = [i for i in texts for _ in range(8)], []
    choice.shuffle(waiting)
    held: dict[str, set[int]] = {name: set() for name in "0123"}
    num_hits = num_asked = 0
    for i in waiting:
        running = running[-15:]
        blocks = blocks_of(texts[i])
        chosen = router.choose(blocks, {name: running.count(name) for name in held})
        router.remember(blocks, chosen)
        num_hits += len(held[chosen].intersection(blocks))
        num_asked += len(blocks)
        held[chosen].update(blocks)
        running.append(chosen)
        texts[i] += "another turn " * 10
    one: set[int] = set()
    best = 0
    texts = {i: f"conversation {i} " * 40 for i in range(64)}
    for i in waiting:
        best += len(one.intersection(blocks_of(texts[i])))
        one.update(blocks_of(texts[i]))
        texts[i] += "another turn " * 10
    assert num_asked > best > 0 and num_hits >= 0.9 * best


def test_prompts_with_a_common_beginning_have_common_blocks() -> None:
    first = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": "question"}]
    more = [*first, {"role": "assistant", "content": "answer " * 30}]
    short, long = (prompt_blocks({"messages": given, "tools": [{"type": "function"}]}) for given in (first, more))
    assert len(short) >= 4 and long[: len(short)] == short
    assert prompt_blocks({"messages": first})[0] != short[0], "tools come first"
    ids = list(range(100))
    assert prompt_blocks({"prompt": ids})[:3] == prompt_blocks({"prompt": [ids[:50]]})
    assert blocks_of("x" * 200, cache_salt="a") != blocks_of("x" * 200)
    assert body_blocks(json.dumps({"prompt": "x" * 200}).encode(), b"key") != blocks_of("x" * 200)
    assert len(blocks_of("x" * 10_000_000)) == MOST_BLOCKS and blocks_of("x" * (BLOCK_CHARACTERS - 1)) == []
    assert prompt_blocks({"input": ["x" * 100, "y"]}) == blocks_of("x" * 100)
    assert blocks_of("x" * 100, model="an adapter")[0] != blocks_of("x" * 100)[0], "adapters have pages of their own"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff", b'{"prompt": 7}', b'{"messages": null}',
                                  b'{"prompt": []}', b'{"prompt": [[]]}', b"[" * 100_000])
def test_what_is_no_prompt_has_no_blocks(body: bytes) -> None:
    assert body_blocks(body) == []


def test_a_prompt_that_can_be_read_but_is_too_deep_to_be_written_has_no_blocks() -> None:
    for depth in range(800, 1000):  # the limit is that of the interpreter, less the calls under way
        body_blocks(b'{"prompt": ' + b'{"x": ' * depth + b"1" + b"}" * depth + b"}")


def test_metrics_of_replicas_are_on_one_page_with_the_number_of_each() -> None:
    page = ('# HELP process_start_time_seconds Begun.\n# TYPE process_start_time_seconds gauge\n'
            'process_start_time_seconds 5\n# HELP vllm:n N.\n# TYPE vllm:n counter\n'
            'vllm:n_total{model_name="a",engine="0",x="1"} 3\n')
    assert joined_metrics({0: page, 2: page}, {0: 0, 1: 4, 2: 0}).splitlines() == [
        "# HELP process_start_time_seconds Begun.", "# TYPE process_start_time_seconds gauge",
        'process_start_time_seconds{engine="0"} 5', 'process_start_time_seconds{engine="2"} 5',
        "# HELP vllm:n N.", "# TYPE vllm:n counter",
        'vllm:n_total{model_name="a",engine="0",x="1"} 3', 'vllm:n_total{model_name="a",engine="2",x="1"} 3',
        "# HELP vllm:replica_up 1 for a replica that answers.", "# TYPE vllm:replica_up gauge",
        'vllm:replica_up{engine="0"} 1', 'vllm:replica_up{engine="1"} 0', 'vllm:replica_up{engine="2"} 1',
        "# HELP vllm:replica_restarts_total Times a replica was started again.",
        "# TYPE vllm:replica_restarts_total counter", 'vllm:replica_restarts_total{engine="0"} 0',
        'vllm:replica_restarts_total{engine="1"} 4', 'vllm:replica_restarts_total{engine="2"} 0']


def test_each_replica_has_devices_or_threads_of_its_own() -> None:
    assert replica_environments("auto", 2, 2, ["4", "5", "6", "7"], {}) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    assert replica_environments("cuda:0", 2, 1, ["0"], {}) == [{}, {}]
    assert replica_environments("cpu", 2, 1, [], {"OMP_NUM_THREADS": "3"}) == [{"OMP_NUM_THREADS": "3"}] * 2
    assert int(replica_environments("auto", 1000, 1, [], {})[0]["OMP_NUM_THREADS"]) == 1
    with pytest.raises(ValueError, match="4 replicas with 2 GPU each need 8 GPUs, and there are 2"):
        replica_environments("cuda", 4, 2, ["0", "1"], {})


def test_what_is_wrong_with_a_node_is_told_all_at_once(tmp_path: Path) -> None:
    wanted = versions_here() | {"torch": "1.0", "outrider": "9"}
    with pytest.raises(NodeNotReady) as told:
        check_node(EngineConfig(str(tmp_path / "nowhere")), ServerConfig(), wanted, 0, {})
    for words in ("torch is", "and 1.0 where the application was built", "outrider is", "1 GPUs are needed", "nowhere"):
        assert words in str(told.value)


def test_a_cluster_that_does_not_answer_is_told_before_ray_tries_for_minutes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "auto"):
            check_address(address)
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(ValueError, match=f"no Ray cluster answers at {address}"):
            check_address(address)


def test_without_ray_the_application_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "outrider.ray.application", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'outrider\[ray\]'"):
        app({"model": "smollm2"})
    assert main(["serve", "smollm2", "--ray"]) == 2
