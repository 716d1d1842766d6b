"""Channel: an authenticated connection between two nodes. No torch.

Both sides prove that they know the secret without sending it, and derive a key for each direction. Every frame has a
number and an HMAC-SHA256 of all its bytes, which are checked before the frame is used. So frames cannot be forged,
repeated, left out or reordered. They are not encrypted.

    node 0 -> node   greeting, nonce                        a peer without the secret gets no further than
    node -> node 0   nonce, proof                           its own proof, which has a fixed length
    node 0 -> node   proof
    then             length, kind, rank | body | HMAC"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import NamedTuple

GREETING = b"outrider ranks 1\n"
TOKEN = "OUTRIDER_RANK_TOKEN"
LEAST_TOKEN = 16  # characters of the secret
NONCE_BYTES = MAC_BYTES = 32
HANDSHAKE_SECONDS = 10.0  # for all of a handshake: a peer cannot hold it up by sending slowly
HEADER = struct.Struct("!QBI")
JOINED_BYTES = 1 << 16  # of a body that is sent in one piece with what goes around it
PIECE_BYTES = 1 << 20  # sent or read at once: memory is taken as bytes arrive, whatever length the header says
KEEPALIVE_SECONDS, UNACKNOWLEDGED_MS = 5, 20_000


class FrameKind(enum.IntEnum):
    """The kind of a frame's content. The rank in the header is used only by kinds that concern one rank."""

    HELLO = 1  # JSON: what a node runs
    SETTINGS = 2  # a pickled EngineConfig, for a node that runs the same code
    MODEL = 3  # text: the digest of the node's model files, found with these settings
    REFUSED = 4  # text: why a node may not join
    WAIT = 5  # text: why a node may not join yet
    START = 6  # a pickled RankJob
    BEAT = 7
    STATUS = 8  # integers: a sign of life, with the RankStatus of every rank of the node
    MESSAGE = 9  # of one rank to or from its parent
    LINK = 10  # of one rank to or from rank 0
    EXITED = 11  # an integer: a rank's process has ended
    FAILED = 12  # text: a node cannot go on


class Frame(NamedTuple):
    kind: FrameKind
    rank: int
    body: bytes


class WrongToken(ValueError):
    """Raised if the peer does not know the secret, or is not a node of this engine."""


def rank_token() -> bytes:
    """Return the secret from the environment variable. Raises ValueError if it is not set."""
    token = os.environ.get(TOKEN, "")
    if len(token) < LEAST_TOKEN:
        what = "is not set" if not token else f"has only {len(token)} characters"
        raise ValueError(f"nnodes above 1: {TOKEN} {what}: set it to the same secret of at least {LEAST_TOKEN} "
                         "characters on every node, for example to what `openssl rand -hex 32` prints")
    return token.encode()


class Channel:
    """A connection to a peer that has proved to know the secret. Several threads may send; one receives."""

    def __init__(self, own: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._socket, self._send_key, self._receive_key = own, send_key, receive_key
        self._sending = threading.Lock()
        self._num_sent = self._num_received = 0
        self.num_reads = 0  # rises whenever bytes arrive: a large frame is a sign of life before it is whole
        own.settimeout(None)

    def send(self, kind: FrameKind, body: bytes | memoryview = b"", rank: int = 0) -> None:
        """Send a frame. Raises OSError if the connection has ended."""
        data = memoryview(body).cast("B")
        header = HEADER.pack(data.nbytes, kind, rank)
        with self._sending:
            mac = _begin_mac(self._send_key, self._num_sent, header)
            self._num_sent += 1
            if data.nbytes <= JOINED_BYTES:
                mac.update(data)
                self._socket.sendall(b"".join((header, data, mac.digest())))
                return
            self._socket.sendall(header)
            for first in range(0, data.nbytes, PIECE_BYTES):
                piece = data[first : first + PIECE_BYTES]
                mac.update(piece)
                self._socket.sendall(piece)
            self._socket.sendall(mac.digest())

    def receive(self) -> Frame:
        """Wait for the next frame. Raises EOFError or OSError if the connection has ended, and WrongToken for a frame
        that the peer did not send."""
        header = self._read(HEADER.size)
        size, kind, rank = HEADER.unpack(header)
        mac = _begin_mac(self._receive_key, self._num_received, header)
        body = self._read(size, mac)
        if not hmac.compare_digest(self._read(MAC_BYTES), mac.digest()):
            raise WrongToken("a message was changed on its way (its HMAC does not match)")
        self._num_received += 1
        return Frame(FrameKind(kind), rank, body)

    def _read(self, size: int, mac: hmac.HMAC | None = None) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = _receive_some(self._socket, size - len(data))
            self.num_reads += 1
            if mac is not None:
                mac.update(piece)
            data += piece
        return bytes(data)

    def close(self) -> None:
        """End the connection. Threads that send or receive get an error."""
        with suppress(OSError):  # the peer has ended it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def greet(own: socket.socket, token: bytes) -> Channel:
    """Carry out node 0's side of the handshake."""
    _prepare(own)
    end = time.monotonic() + HANDSHAKE_SECONDS
    nonce = os.urandom(NONCE_BYTES)
    own.sendall(GREETING + nonce)
    answer = _read(own, NONCE_BYTES + MAC_BYTES, end)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(token, b"node", nonces)):
        raise WrongToken(f"its {TOKEN} differs from that of node 0, or it is not a node")
    own.sendall(_proof(token, b"node 0", nonces))
    return Channel(own, _proof(token, b"key down", nonces), _proof(token, b"key up", nonces))


def answer(own: socket.socket, token: bytes) -> Channel:
    """Carry out the handshake on the side of the node that connects to node 0."""
    _prepare(own)
    end = time.monotonic() + HANDSHAKE_SECONDS
    greeting = _read(own, len(GREETING) + NONCE_BYTES, end)
    if not greeting.startswith(GREETING):
        raise WrongToken("it is not node 0 of an engine, or runs another version")
    mine = os.urandom(NONCE_BYTES)
    nonces = greeting[len(GREETING):] + mine
    own.sendall(mine + _proof(token, b"node", nonces))
    try:
        proof = _read(own, MAC_BYTES, end)
    except (EOFError, ConnectionResetError):
        raise WrongToken(f"its {TOKEN} differs from that of this node") from None
    if not hmac.compare_digest(proof, _proof(token, b"node 0", nonces)):
        raise WrongToken(f"its {TOKEN} differs from that of this node")
    return Channel(own, _proof(token, b"key up", nonces), _proof(token, b"key down", nonces))


def _prepare(own: socket.socket) -> None:
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", KEEPALIVE_SECONDS), ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
                        ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS)):
        if hasattr(socket, name):  # Linux
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    own.settimeout(HANDSHAKE_SECONDS)


def _read(own: socket.socket, size: int, end: float) -> bytes:
    """Read `size` bytes. Raises an error if they have not come by the time `end`."""
    data = b""
    while len(data) < size:
        own.settimeout(max(0.001, end - time.monotonic()))
        data += _receive_some(own, size - len(data))
    return data


def _receive_some(own: socket.socket, most: int) -> bytes:
    piece = own.recv(min(PIECE_BYTES, most))
    if not piece:
        raise EOFError("the connection has ended")
    return piece


def _begin_mac(key: bytes, number: int, header: bytes) -> hmac.HMAC:
    return hmac.new(key, number.to_bytes(8, "big") + header, hashlib.sha256)


def _proof(token: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, GREETING + label + b"\0" + nonces, "sha256")
