"""The connection between nodes: who is let in, what a node must run, and what bytes of no meaning do (nothing)."""

from __future__ import annotations

import hmac
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.engine.hosts import channel as channels
from outrider.engine.hosts import host_agent, host_link, meeting
from outrider.engine.hosts.channel import Channel, FrameKind, WrongToken, answer, greet, rank_token
from outrider.engine.hosts.liveness import BEAT_SECONDS, Silence
from outrider.engine.hosts.meeting import meet_nodes
from outrider.engine.hosts.node_facts import NodeFacts, differences, model_digest, settings_of, with_own_settings
from outrider.engine.load import find_model
from tests.engine.harness import CONFIGS, save_folder
from tests.ranks.nodes import SECRET, free_port, garble

TOKEN = SECRET.encode()


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def both_ends(token: bytes = TOKEN, other: bytes = TOKEN) -> tuple[Future[Channel], Future[Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()

    def closing(work: Callable[[socket.socket, bytes], Channel], own: socket.socket, secret: bytes) -> Channel:
        try:
            return work(own, secret)
        except BaseException:
            own.close()
            raise

    return in_thread(lambda: closing(greet, near, token)), in_thread(lambda: closing(answer, far, other))


def test_frames_arrive_whole_and_in_order() -> None:
    down, up = (end.result(10) for end in both_ends())
    bodies = [b"", b"x", os.urandom(channels.JOINED_BYTES + 1), os.urandom(3 * channels.PIECE_BYTES + 5)]

    def send() -> None:
        for number, body in enumerate(bodies):
            down.send(FrameKind.MESSAGE, body, number)
            up.send(FrameKind.LINK, memoryview(body), number)

    sent = in_thread(send)
    backwards = in_thread(lambda: [down.receive() for _ in bodies])
    assert [up.receive() for _ in bodies] == [(FrameKind.MESSAGE, i, body) for i, body in enumerate(bodies)]
    assert backwards.result(10) == [(FrameKind.LINK, i, body) for i, body in enumerate(bodies)]
    sent.result(10)
    down.close()
    with pytest.raises((EOFError, OSError)):
        up.receive()


def test_another_secret_is_refused_on_both_sides() -> None:
    down, up = both_ends(other=b"another secret of tests")
    with pytest.raises(WrongToken, match="OUTRIDER_RANK_TOKEN differs"):
        down.result(10)
    with pytest.raises(WrongToken, match="OUTRIDER_RANK_TOKEN differs"):
        up.result(10)


class Wire:
    """A channel's end whose peer is this test: bytes as they travel."""

    def __init__(self) -> None:
        self.far, near = socket.socketpair()
        self.channel = Channel.__new__(Channel)
        self.channel.__init__(near, b"a" * 32, b"b" * 32)  # type: ignore[misc]

    def frame(self, number: int, body: bytes, key: bytes = b"b" * 32) -> bytes:
        header = channels.HEADER.pack(len(body), FrameKind.MESSAGE, 1)
        return header + body + hmac.digest(key, number.to_bytes(8, "big") + header + body, "sha256")


@pytest.mark.parametrize("change", ["bit", "repeated", "skipped", "reflected", "random"])
def test_a_frame_that_the_peer_did_not_send_is_given_to_nobody(change: str) -> None:
    wire, drawn = Wire(), random.Random(3)
    wire.far.sendall(wire.frame(0, b"first"))
    assert wire.channel.receive().body == b"first"
    good = wire.frame(1, b"second")
    place = drawn.randrange(channels.HEADER.size, len(good))
    data = {
        "bit": good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :], "repeated": wire.frame(0, b"first"),
        "skipped": wire.frame(2, b"third"), "reflected": wire.frame(1, b"second", b"a" * 32),
        "random": channels.HEADER.pack(20, 7, 1) + drawn.randbytes(52),
    }[change]
    wire.far.sendall(data)
    with pytest.raises(WrongToken):
        wire.channel.receive()


def test_a_secret_must_be_there_and_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_RANK_TOKEN", raising=False)
    with pytest.raises(ValueError, match="OUTRIDER_RANK_TOKEN is not set: set it to the same secret"):
        rank_token()
    monkeypatch.setenv("OUTRIDER_RANK_TOKEN", "short")
    with pytest.raises(ValueError, match="OUTRIDER_RANK_TOKEN has only 5 characters"):
        rank_token()


# What nodes run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("nodes") / "tiny", CONFIGS["llama"], seed=5))


def config_of(model: str, **settings: Any) -> EngineConfig:
    return EngineConfig(model, tensor_parallel_size=4, nnodes=2, device="cpu", **settings)


def facts_of(model: str, **settings: Any) -> NodeFacts:
    config = config_of(model, **settings)
    return NodeFacts.of_this_node(config)


def test_differences_are_named_with_both_values(model: str) -> None:
    here = facts_of(model, dtype="float64", num_pages=9)
    there = NodeFacts.from_json(facts_of(model, dtype="float64", node_rank=1, master_addr="10.0.0.1").to_json())
    assert differences(here, there) == []  # what is not given there is node 0's
    assert set(there.settings) == {"tensor_parallel_size", "nnodes", "device", "dtype"}
    other = replace(there, versions=there.versions | {"torch": "1.0"}, settings=there.settings | {"dtype": "bfloat16"})
    torch, dtype = differences(here, other)
    assert torch == f"torch is {here.versions['torch']!r} on node 0 and '1.0' on node 1"
    assert dtype == "dtype is 'float64' on node 0 and 'bfloat16' on node 1"
    code = replace(there, versions=there.versions | {"outrider's code": "0"})
    assert [line.split(" is ")[0] for line in differences(here, code)] == ["outrider's code"]


def test_settings_of_a_machine_are_its_own(model: str) -> None:
    front = config_of(model, max_step_ms=7.0, download_dir="/front")
    own = config_of("/elsewhere", node_rank=1, download_dir="/here")
    merged = with_own_settings(front, own)
    assert (merged.model, merged.download_dir, merged.node_rank, merged.max_step_ms) == ("/elsewhere", "/here", 1, 7.0)
    assert "download_dir" not in settings_of(front)


def test_the_digest_reads_samples_of_the_weights(model: str, tmp_path: Path) -> None:
    config = config_of(model)
    source = find_model(config)
    whole = model_digest(config, source)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in Path(model).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert model_digest(config, find_model(config_of(str(copy)))) == whole
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert model_digest(config, replace(source, path=copy)) != whole


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 5000, b'{"node": "1"}',
                                  b'{"node": 1, "versions": [], "settings": {}}'])
def test_facts_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        NodeFacts.from_json(data)


# The meeting


@pytest.fixture
def own_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OUTRIDER_RANK_TOKEN", SECRET)
    yield


def front_of(model: str, port: int) -> Future[Any]:
    config = config_of(model, master_port=port)
    return in_thread(lambda: meet_nodes(config, find_model(config)))


def try_to_join(model: str, port: int, token: bytes = TOKEN, **settings: Any) -> Channel:
    config = config_of(model, master_port=port, node_rank=1, **settings)
    while True:
        try:
            return host_agent._join(config, token).channel
        except ConnectionRefusedError:
            pass


def test_only_the_right_node_joins(model: str, own_token: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_SECONDS", 1.0)
    port = free_port()
    front = front_of(model, port)
    with pytest.raises(WrongToken):
        try_to_join(model, port, b"another secret of tests")
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(meeting.MOST_HANDSHAKES)]
    garble("127.0.0.1", port)  # more than may shake hands at once
    for one in idle:
        one.close()
    joined = None
    while joined is None:
        try:
            joined = try_to_join(model, port)
        except (WrongToken, EOFError, OSError):  # the idle ones are still there
            pass
    place, (link,) = front.result(10)
    assert (place.node, place.num_nodes, link.place.node) == (0, 2, 1) and [own.rank for own in link.ranks] == [2, 3]
    with pytest.raises(OSError):  # nobody listens any more
        socket.create_connection(("127.0.0.1", port), 2)
    joined.close()
    link.ranks[0].process.join(10)
    assert link.ranks[0].process.exitcode == host_link.LOST
    assert "node 1 (127.0.0.1) with ranks 2, 3 is lost: it has ended its connection" == link.ranks[0].loss


@pytest.mark.parametrize(("settings", "words"), [
    ({"dtype": "float64"}, "dtype is 'auto' on node 0 and 'float64' on node 1"),
    ({"exact": True}, "exact is False on node 0 and True on node 1"),
    ({"model": "tuned"}, "the model's digest is [0-9a-f]+ on node 0 and [0-9a-f]+ on node 1: the files must be"),
])
def test_a_node_with_other_settings_or_files_is_refused_on_both_sides(
        model: str, own_token: None, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    port = free_port()
    front = front_of(model, port)
    theirs = model
    if "model" in settings:  # the same sizes and names, other numbers
        settings, theirs = {}, str(save_folder(tmp_path / "tuned", CONFIGS["llama"], seed=6))
    with pytest.raises(ValueError, match=words):
        try_to_join(theirs, port, **settings)
    with pytest.raises(ValueError, match=rf"node 1 \(127.0.0.1\) cannot join: {words}"):
        front.result(10)


def test_a_node_of_another_version_is_refused(model: str, own_token: None, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    front = front_of(model, port)
    config = config_of(model, node_rank=1)
    older = NodeFacts.of_this_node(config)
    older.versions["outrider"] = "0.0.1"
    here = NodeFacts.of_this_node
    monkeypatch.setattr(NodeFacts, "of_this_node", lambda own: older if own.node_rank else here(own))
    with pytest.raises(ValueError, match="outrider is '.*' on node 0 and '0.0.1' on node 1"):
        try_to_join(model, port)
    with pytest.raises(ValueError, match="cannot join: outrider is"):
        front.result(10)


def test_nodes_that_do_not_come_are_named(model: str, own_token: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "TELL_SECONDS", 0.05)
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.1)
    with pytest.raises(ValueError, match="node 1 did not join 127.0.0.1:.* start `outrider serve` there"):
        front_of(model, free_port()).result(10)
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(ValueError, match="node 0 cannot listen at master_addr='127.0.0.1'"):
        front_of(model, taken.getsockname()[1]).result(10)


def test_silence_counts_only_while_this_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, clock = Wire(), [0.0]
    monkeypatch.setattr("outrider.engine.hosts.liveness.time.monotonic", lambda: clock[0])
    silence = Silence(wire.channel)
    assert silence.look() == 0
    clock[0] += 3600  # the machine was suspended
    assert silence.look() == 2 * BEAT_SECONDS
    clock[0] += BEAT_SECONDS
    assert silence.look() == 3 * BEAT_SECONDS
    wire.channel.num_reads += 1
    assert silence.look() == 0


def test_numbers_of_nodes_that_make_no_sense_are_refused() -> None:
    for settings in ({"nnodes": 3}, {"node_rank": 1}, {"nnodes": 2, "node_rank": 2}):
        with pytest.raises(ValueError, match="must be above node_rank .* and divide tensor_parallel_size .4."):
            EngineConfig("m", tensor_parallel_size=4, **settings)
