"""HostAgent: runs on every node except node 0. It joins node 0, starts its ranks, and passes messages between them and
node 0. When node 0 or the engine ends, it ends its ranks and joins again. No torch."""

from __future__ import annotations

import array
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from outrider.config import EngineConfig
from outrider.engine.hosts.channel import Channel, FrameKind, WrongToken, answer, rank_token
from outrider.engine.hosts.liveness import BEAT_SECONDS, Outbox, Silence
from outrider.engine.hosts.meeting import ranks_of
from outrider.engine.hosts.node_facts import NodeFacts, model_digest, with_own_settings
from outrider.engine.hosts.node_ranks import RankJob
from outrider.engine.load import find_model
from outrider.engine.rank_processes import RankStarter, StartedRank, make_links
from outrider.models.sources.model_source import ModelSource

OWN_ADDRESS = "OUTRIDER_HOST_IP"  # the address from which this node connects, where it has several
CONNECT_SECONDS = 10.0
AGAIN_SECONDS = 1.0  # between two attempts to join
TELL_SECONDS = 60.0
# Without a byte from node 0, until its ranks are ended. Longer than node 0 waits: its process has more to do.
CUT_OFF_SECONDS = 20.0
EXIT_SECONDS = 30.0  # for a rank that has closed its pipe
log = logging.getLogger("outrider")


class NotYet(Exception):
    """Raised while node 0 accepts no nodes, for example because its engine has not started yet."""


def host_ranks(config: EngineConfig, tell: Callable[[str], None]) -> None:
    """Run this node's ranks of node 0's engine until an interrupt. Raises ValueError if node 0 refuses this node.
    `tell` shows a line to the user."""
    token, where = rank_token(), f"node 0 at {config.master_addr}:{config.master_port}"
    told = float("-inf")
    while True:
        try:
            joined = _join(config, token)
        except (OSError, EOFError, NotYet) as error:
            if time.monotonic() - told > TELL_SECONDS:
                tell(f"node {config.node_rank} waits for {where} ({error})")
                told = time.monotonic()
            time.sleep(AGAIN_SECONDS)
            continue
        except WrongToken as error:
            raise ValueError(f"cannot join {where}: {error}") from None
        tell(f"node {config.node_rank} has joined {where} and holds ranks for it")
        tell(f"{where} has ended the ranks of node {config.node_rank}: {_serve(joined)}")
        told = float("-inf")


class Joined(NamedTuple):
    """A connection to node 0, which has accepted this node."""

    channel: Channel
    config: EngineConfig  # node 0's settings, with those of this machine
    source: ModelSource


def _join(config: EngineConfig, token: bytes) -> Joined:
    mine = os.environ.get(OWN_ADDRESS)
    own = socket.create_connection((config.master_addr, config.master_port), CONNECT_SECONDS,
                                   source_address=(mine, 0) if mine else None)
    try:
        channel = answer(own, token)
        channel.send(FrameKind.HELLO, NodeFacts.of_this_node(config).to_json())
        config = with_own_settings(_read_settings(_receive(channel, FrameKind.SETTINGS)), config)
        source = find_model(config)
        channel.send(FrameKind.MODEL, model_digest(config, source).encode())
        _receive(channel, FrameKind.BEAT)
    except BaseException:
        own.close()
        raise
    return Joined(channel, config, source)


def _read_settings(pickled: bytes) -> EngineConfig:
    try:
        config: EngineConfig = pickle.loads(pickled)
    except Exception as error:  # of a class that is not installed here
        raise ValueError(f"the settings of node 0 cannot be read here: {error}: install the code that they name on "
                         "every node") from error
    return config


def _receive(channel: Channel, wanted: FrameKind) -> bytes:
    kind, _, body = channel.receive()
    if kind == FrameKind.WAIT:
        raise NotYet(body.decode())
    if kind != wanted:
        raise ValueError(body.decode(errors="replace"))
    return body


def _serve(joined: Joined) -> str:
    """Wait for a job, carry it out until node 0 ends it, and end the ranks. Returns the reason for the end."""
    relay = _Relay(joined)
    try:
        return relay.run()
    finally:
        joined.channel.close()
        relay.end()


class _Relay:
    """Passes messages between node 0 and the ranks of this node."""

    def __init__(self, joined: Joined) -> None:
        self._channel, self._config, self._source = joined
        self._why = ""
        self._ranks: list[StartedRank] = []
        self._to_ranks: dict[tuple[FrameKind, int], Outbox] = {}
        self._is_over = False
        self._telling = threading.Lock()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name="outrider-agent", daemon=True).start()

    def run(self) -> str:
        try:
            while True:
                kind, rank, body = self._channel.receive()
                match kind:
                    case FrameKind.START:
                        self._start(body)
                    case FrameKind.MESSAGE | FrameKind.LINK:
                        self._to_ranks[kind, rank].put(body)
        except (EOFError, OSError):
            return self._why or "its connection has ended"
        except WrongToken as error:
            return str(error)

    def end(self) -> None:
        self._is_over = True
        for outbox in self._to_ranks.values():
            outbox.close()
        for one in self._ranks:
            one.own.process.kill()
        for one in self._ranks:
            one.own.process.join(EXIT_SECONDS)

    def _start(self, pickled: bytes) -> None:
        try:
            job: RankJob = pickle.loads(pickled)
            links = make_links(ranks_of(self._config.node_rank, self._config))
            starter = RankStarter(self._config, self._source, job.features, job.level, job.host)
            started = starter.start({rank: (end,) for rank, (_, end) in links.items()})
        except Exception as error:
            self._channel.send(FrameKind.FAILED, f"it could not start its ranks: {error}".encode())
            raise EOFError from error
        self._ranks = started
        for one in started:
            rank, link = one.own.rank, links[one.own.rank][0]
            self._to_ranks[FrameKind.MESSAGE, rank] = Outbox(one.pipe)
            self._to_ranks[FrameKind.LINK, rank] = Outbox(link)
            for work, args in ((self._pass_messages, (one,)), (self._pass_on, (FrameKind.LINK, rank, link))):
                threading.Thread(target=work, args=args, name="outrider-relay", daemon=True).start()

    def _pass_messages(self, one: StartedRank) -> None:
        """Forward the messages of one rank to node 0. When the rank ends, send its last status and its exit code."""
        self._pass_on(FrameKind.MESSAGE, one.own.rank, one.pipe)
        one.own.process.join(EXIT_SECONDS)
        code = one.own.process.exitcode
        with suppress(OSError):  # node 0 is gone
            self._tell_status()  # the last beat may tell what the rank did before it died
            self._channel.send(FrameKind.EXITED, str(1 if code is None else code).encode(), one.own.rank)

    def _pass_on(self, kind: FrameKind, rank: int, pipe: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._channel.send(kind, pipe.recv_bytes(), rank)

    def _beat(self) -> None:
        with suppress(OSError):
            while not self._is_over:
                self._tell_status()
                time.sleep(BEAT_SECONDS)

    def _tell_status(self) -> None:
        """Send the current status of every rank to node 0."""
        with self._telling:  # an older status is never sent after a newer one
            numbers = array.array("q")
            for one in self._ranks:
                numbers.extend((one.own.process.pid or 0, *one.numbers))
            self._channel.send(FrameKind.STATUS, numbers.tobytes())

    def _watch(self) -> None:
        silence = Silence(self._channel)
        while not self._is_over:
            time.sleep(BEAT_SECONDS)
            if silence.look() > CUT_OFF_SECONDS:
                self._why = f"nothing has come from it for {CUT_OFF_SECONDS:.0f} s"
                self._channel.close()
                return
