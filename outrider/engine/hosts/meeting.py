"""meet_nodes: node 0 waits for every other node to join, and checks that each has the same software, settings and
model files as node 0. No torch."""

from __future__ import annotations

import logging
import pickle
import socket
import threading
import time
from contextlib import suppress

from outrider.config import EngineConfig
from outrider.engine.hosts.channel import Channel, FrameKind, WrongToken, greet, rank_token
from outrider.engine.hosts.host_link import HostLink
from outrider.engine.hosts.node_facts import NodeFacts, differences, model_digest
from outrider.models.sources.model_source import ModelSource
from outrider.runner.rank_link import HostPlace

JOIN_SECONDS = 1800.0  # that nodes have for coming
TELL_SECONDS = 60.0  # between two messages that name the nodes which are missing
MOST_HANDSHAKES = 32  # at once; further peers are sent away
log = logging.getLogger("outrider")


def meet_nodes(config: EngineConfig, source: ModelSource) -> tuple[HostPlace, list[HostLink]]:
    """Wait for the other nodes. Returns this node's place and the connections, in the order of nodes. Raises ValueError
    if a node differs from node 0 or does not connect in time."""
    token, digest = rank_token(), model_digest(config, source)
    with _listen(config.master_addr, config.master_port) as listener:
        meeting = _Meeting(config, digest, token, listener)
        try:
            return HostPlace(0, config.nnodes, listener.getsockname()[0]), meeting.wait()
        except BaseException:
            meeting.send_away()
            raise
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts


def ranks_of(node: int, config: EngineConfig) -> range:
    each = config.tensor_parallel_size // config.nnodes
    return range(node * each, (node + 1) * each)


def _listen(address: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise ValueError(f"node 0 cannot listen at master_addr={address!r}, master_port={port}: {error}: give an "
                         "address of this machine at which the other nodes reach it, and a free port") from None


def _receive(channel: Channel, kind: FrameKind) -> bytes:
    frame = channel.receive()
    if frame.kind != kind:
        raise ValueError(f"it sent a message {frame.kind.name} instead of {kind.name}")
    return frame.body


class _Meeting:
    def __init__(self, config: EngineConfig, digest: str, token: bytes, listener: socket.socket) -> None:
        self._config, self._digest, self._token, self._listener = config, digest, token, listener
        self._change = threading.Condition()
        self._joined: dict[int, HostLink] = {}
        self._refusal = ""
        self._is_over = False
        self._free = threading.BoundedSemaphore(MOST_HANDSHAKES)
        threading.Thread(target=self._accept, name="outrider-meeting", daemon=True).start()

    def wait(self) -> list[HostLink]:
        end = time.monotonic() + JOIN_SECONDS
        with self._change:
            while not self._change.wait_for(lambda: self._refusal or not self._missing, TELL_SECONDS):
                where = f"{self._config.master_addr}:{self._config.master_port}"
                log.warning("waiting at %s for %s", where, self._missing_words)
                if time.monotonic() > end:
                    raise ValueError(f"{self._missing_words} did not join {where} in {JOIN_SECONDS:.0f} s: start "
                                     "`outrider serve` there with the same settings and its own --node-rank")
            self._is_over = True
            if self._refusal:
                raise ValueError(self._refusal)
            return [self._joined[node] for node in sorted(self._joined)]

    def send_away(self) -> None:
        self._is_over = True
        for link in list(self._joined.values()):
            link.lose("node 0 did not start")

    @property
    def _missing(self) -> list[int]:
        return [node for node in range(1, self._config.nnodes) if node not in self._joined]

    @property
    def _missing_words(self) -> str:
        return f"node{'s' * (len(self._missing) > 1)} {', '.join(map(str, self._missing))}"

    def _accept(self) -> None:
        while True:
            try:
                peer, (address, *_) = self._listener.accept()
            except OSError:  # closed
                return
            if not self._free.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._admit, args=(peer, address), name="outrider-meeting", daemon=True).start()

    def _admit(self, peer: socket.socket, address: str) -> None:
        try:
            self._take(greet(peer, self._token), address)
        except (WrongToken, EOFError, OSError, ValueError) as error:
            log.warning("%s was refused as a node: %s", address, error or "it sent nothing")
            peer.close()
        finally:
            self._free.release()

    def _take(self, channel: Channel, address: str) -> None:
        there = NodeFacts.from_json(_receive(channel, FrameKind.HELLO))
        found = differences(NodeFacts.of_this_node(self._config), there)
        if there.node not in range(1, self._config.nnodes):
            found.append(f"there are nodes 1 to {self._config.nnodes - 1}, and it is node {there.node}")
        if not found:
            channel.send(FrameKind.SETTINGS, pickle.dumps(self._config))
            digest = _receive(channel, FrameKind.MODEL).decode()  # perhaps after a download
            if digest != self._digest:
                found.append(f"the model's digest is {self._digest} on node 0 and {digest} on node {there.node}: the "
                             "files must be the same on both")
        if found:
            self._refuse(channel, f"node {there.node} ({address}) cannot join: {'; '.join(found)}")
            return
        with self._change:
            if there.node in self._joined or self._is_over:
                channel.send(FrameKind.WAIT, f"node {there.node} is there already".encode())
                channel.close()
                return
            place = HostPlace(there.node, self._config.nnodes, address)
            link = self._joined[there.node] = HostLink(channel, place, ranks_of(there.node, self._config))
            link.on_loss = self._lost
            self._change.notify_all()
        log.info("node %d has joined from %s", there.node, address)

    def _refuse(self, channel: Channel, why: str) -> None:
        with suppress(OSError):
            channel.send(FrameKind.REFUSED, why.encode())
        channel.close()
        with self._change:
            self._refusal = why
            self._change.notify_all()

    def _lost(self, link: HostLink) -> None:
        """Remove a node that left while node 0 still waits for others. After the start its loss ends the engine."""
        with self._change:
            if not self._is_over and self._joined.get(link.place.node) is link:
                log.warning("%s", link.loss)
                del self._joined[link.place.node]
