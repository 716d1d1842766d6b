"""A server over four hosts (network namespaces): every request has its text or an error that names the rank and the
host, and the server comes back without a hand."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.harness import CONFIGS, byte_tokenizer, greedy, save_folder
from tests.ranks.network import Hosts, hosts
from tests.ranks.nodes import PATIENCE, SECRET, garble
from tests.ranks.test_engine import started as engine
from tests.ranks.test_engine import wait_for_end

pytestmark = pytest.mark.long
COUNT, PORT, RANK_PORT = 4, 8077, 29577
PACKAGE = Path(__file__).parents[2]
FLAGS = ["--device", "cpu", "--dtype", "float64", "--num-pages", "128", "--max-model-len", "120", "--max-num-seqs", "4"]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
ASKS = [{"prompt": list(range(5 + number, 30 + 3 * number)), "max_tokens": 24} for number in range(8)]


@pytest.fixture(scope="module")
def net() -> Iterator[Hosts]:
    with hosts(COUNT) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("served") / "tiny-bytes", CONFIGS["llama"] | {"num_key_value_heads": 4})
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    with engine(str(folder), 1, num_pages=128, max_model_len=120) as llm:
        outputs = llm.generate([list(ask["prompt"]) for ask in ASKS],
                               [greedy(ask["max_tokens"], ignore_eos=True) for ask in ASKS], use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


class Command:
    """`outrider serve` on one of the hosts."""

    def __init__(self, net: Hosts, host: int, folder: Path, *flags: str, secret: str = SECRET,
                 package: Path = PACKAGE) -> None:
        common = ["-tp", str(COUNT), "--nnodes", str(COUNT), "--node-rank", str(host), "--master-addr", net.address(0),
                  "--master-port", str(RANK_PORT), "--speculative-config", json.dumps(DRAFTS)]
        command = ["ip", "netns", "exec", net.name(host), sys.executable, "-m", "outrider.cli", "serve", str(folder),
                   *FLAGS, *common, *flags]
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
                                        cwd=package, env=os.environ | {
            "OUTRIDER_RANK_TOKEN": secret, "PYTHONPATH": str(package), "OUTRIDER_API_KEY": ""})
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def rank_ids(self) -> list[int]:
        return [own.pid for own in psutil.Process(self.process.pid).children()
                if "spawn_main" in " ".join(own.cmdline())]

    def fails_with(self, words: str) -> None:
        assert self.process.wait(PATIENCE) != 0
        time.sleep(0.2)
        assert re.search(words, self.text), self.text

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


def front_flags(net: Hosts) -> list[str]:
    return ["--host", net.address(0), "--port", str(PORT), "--max-restarts", "20"]


@pytest.fixture(scope="module")
def server(net: Hosts, folder: Path) -> Iterator[list[Command]]:
    commands = [Command(net, 0, folder, *front_flags(net)), *(Command(net, host, folder) for host in range(1, COUNT))]
    try:
        yield commands
    finally:
        for own in commands:
            own.end()


def url(net: Hosts, path: str) -> str:
    return f"http://{net.address(0)}:{PORT}{path}"


def wait_healthy(net: Hosts, commands: list[Command]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for own in commands:
            assert own.process.poll() is None, own.text
        try:
            if httpx.get(url(net, "/health"), timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError("\n".join(own.text for own in commands))


def tokens_of(net: Hosts, ask: dict[str, Any]) -> Any:
    """The tokens of an answer, or the error."""
    body = ask | {"model": "tiny-bytes", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(url(net, "/v1/completions"), json=body, timeout=PATIENCE)
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.text


def ask_all(net: Hosts, count: int = 1) -> list[Any]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda ask: tokens_of(net, ask), ASKS * count))


def break_while_running(net: Hosts, front: Command, expected: list[Any], fault: Callable[[], object]) -> str:
    """Break something while requests run. Each has its tokens or an error, soon. Returns what the log said of it:
    clients are told no addresses."""
    before = len(front.text)
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(lambda own=ask: tokens_of(net, own)) for ask in ASKS * 4]
        time.sleep(0.5)
        begin = time.monotonic()
        fault()
        found = [one.result() for one in others]
    errors = [own for own in found if isinstance(own, str)]
    for index, own in enumerate(found):
        assert isinstance(own, str) or own == expected[index % len(ASKS)]
    assert errors and all("the engine " in own for own in errors), errors
    assert time.monotonic() - begin < 60
    return front.text[before:]


def test_a_node_with_another_secret_or_other_code_is_refused(net: Hosts, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "outrider", tmp_path / "outrider", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "outrider" / "config.py", "a") as file:
        file.write("# changed\n")
    front = Command(net, 0, folder, *front_flags(net))
    try:
        while "tiny-bytes at" not in front.text:
            time.sleep(0.1)
        Command(net, 1, folder, secret="another secret of tests").fails_with("cannot join .*: its "
                                                                             "OUTRIDER_RANK_TOKEN differs")
        garble(net.address(0), RANK_PORT)
        assert front.process.poll() is None
        words = "outrider's code is '[0-9a-f]+' on node 0 and '[0-9a-f]+' on node 1"
        Command(net, 1, folder, package=tmp_path).fails_with(words)
        front.fails_with(rf"node 1 \({net.address(1)}\) cannot join: {words}")
    finally:
        front.end()


def test_every_request_has_its_tokens(net: Hosts, server: list[Command], expected: list[Any]) -> None:
    wait_healthy(net, server)
    assert ask_all(net, 8) == expected * 8
    for host in range(COUNT):
        ports = net.listening(host)
        assert {address for address, _ in ports} == {net.address(host)}
        for address, port in ports - {(net.address(0), PORT)}:
            garble(address, port)
    assert ask_all(net) == expected


def test_a_slow_link_changes_no_token(net: Hosts, server: list[Command], expected: list[Any]) -> None:
    wait_healthy(net, server)
    net.slow_down(2)
    try:
        assert [tokens_of(net, ask) for ask in ASKS[:2]] == expected[:2]
    finally:
        net.speed_up(2)


def test_a_host_that_is_cut_off_is_named_and_comes_back(net: Hosts, server: list[Command], expected: list[Any]) -> None:
    wait_healthy(net, server)
    ranks = [pid for own in server for pid in own.rank_ids]
    assert len(ranks) == COUNT
    told = break_while_running(net, server[0], expected, lambda: net.cut_off(2))
    assert f"node 2 ({net.address(2)}) with rank 2 is lost: nothing has come from it for 10 s" in told
    wait_for_end(ranks)  # on the lost host too
    assert httpx.get(url(net, "/health"), timeout=5).status_code == 503
    net.connect(2)
    wait_healthy(net, server)
    assert ask_all(net) == expected


def test_a_killed_rank_is_named_and_comes_back(net: Hosts, server: list[Command], expected: list[Any]) -> None:
    wait_healthy(net, server)
    (pid,) = server[3].rank_ids
    told = break_while_running(net, server[0], expected, lambda: os.kill(pid, signal.SIGKILL))
    assert re.search(rf"rank 3 on node 3 \({net.address(3)}\) died when it .*SIGKILL", told), told
    wait_healthy(net, server)
    assert ask_all(net) == expected


def test_nodes_wait_for_a_killed_node_0(net: Hosts, server: list[Command], expected: list[Any], folder: Path) -> None:
    wait_healthy(net, server)
    ranks = [pid for own in server for pid in own.rank_ids]
    server[0].process.kill()
    server[0].process.wait()
    wait_for_end(ranks)
    server[0] = Command(net, 0, folder, *front_flags(net))
    wait_healthy(net, server)
    assert ask_all(net) == expected


def test_a_killed_agent_may_be_started_again(net: Hosts, server: list[Command], expected: list[Any],
                                             folder: Path) -> None:
    wait_healthy(net, server)
    server[1].process.kill()
    server[1].process.wait()
    server[1] = Command(net, 1, folder)
    while "has joined" not in server[1].text:
        assert server[1].process.poll() is None, server[1].text
        time.sleep(0.1)
    assert f"node 1 ({net.address(1)}) with rank 1 is lost: it has ended its connection" in server[0].text
    wait_healthy(net, server)
    assert ask_all(net) == expected
