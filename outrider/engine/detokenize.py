"""Turns tokens into text piece by piece, and finds stop strings in the pieces. A run is the tokens that one step
adds; it may have any length.

A piece never holds half a character, and the pieces of a text together are exactly `Tokenizer.decode` of all its
tokens, however they were split into runs. Each token has its own piece (often empty while a character is incomplete),
so the text depends on the tokens alone and never on how many of them a step yielded.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from outrider.engine.text import Tokenizer, TokenizerError

# Any text that every decoder gives back unchanged; put before tokens, it makes them the middle of a text.
CONTEXT = "a"
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class _Decoder(Protocol):
    num_waiting: int  # characters that the waiting tokens make by themselves

    def feed(self, token: str) -> str: ...

    def finish(self) -> str: ...

    def own_text(self, token: str) -> str:
        """Return the text of a token in the middle of a text. Bytes that cannot begin a character are included as
        replacement characters."""


class Detokenizer:
    """Turns the tokens of one request's output into text, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = _make_decoder(tokenizer)

    def feed(self, run: Sequence[int]) -> list[str]:
        """Return one piece of text for each token of the run."""
        return [self._piece(token_id) for token_id in run]

    def finish(self) -> str:
        """Return the text that was held back. Called after the last token."""
        return self._decoder.finish()

    @property
    def num_waiting(self) -> int:
        """Return the number of characters that are held back although they are complete."""
        return self._decoder.num_waiting

    def own_text(self, token_id: int) -> str:
        """Return the text that this token alone adds in the middle of a longer text. Changes no state."""
        token = self._written(token_id)
        return "" if token is None else self._decoder.own_text(token)

    def _piece(self, token_id: int) -> str:
        token = self._written(token_id)
        return "" if token is None else self._decoder.feed(token)

    def _written(self, token_id: int) -> str | None:
        """Return a token as the tokenizer's file writes it. None if it adds no text: skipped special tokens, and ids
        that only pad the model's vocabulary."""
        return None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)


class TokenOffsets:
    """Finds the character of a text at which each token begins. A token that is a part of a character begins where that
    character does."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._length = 0  # length of the text so far, without the part that waits

    def feed(self, run: Sequence[int]) -> list[int]:
        """Return one offset for each token of the run, in characters."""
        return [self._offset(token_id) for token_id in run]

    def _offset(self, token_id: int) -> int:
        offset = self._length + self._detokenizer.num_waiting
        (piece,) = self._detokenizer.feed([token_id])
        self._length += len(piece)
        # A piece also holds what waited, and ends with all of the token's own text.
        return max(offset, self._length - len(self._detokenizer.own_text(token_id))) if piece else offset


def _make_decoder(tokenizer: Tokenizer) -> _Decoder:
    decoder = tokenizer.backend.decoder
    steps = _decoder_steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevel()
    for step in steps:
        if not _is_streamable(step):
            raise TokenizerError(f"{tokenizer.source}: text cannot be decoded in pieces with this tokenizer's "
                                 f"decoder ({json.dumps(step)}): use skip_tokenizer_init=True")
    return _Pieces(decoder, has_byte_tokens="ByteFallback" in kinds)


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return [{"type": "none"}]
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_streamable(step: dict[str, Any]) -> bool:
    """Whether this decoder step can decode a text piece by piece, because no later token changes the text of an earlier
    one."""
    match step["type"]:
        case "ByteFallback" | "Fuse" | "Metaspace" | "WordPiece":
            return True
        case "Replace":
            return len(step["pattern"].get("String", "")) == 1
        case "Strip":
            return step["stop"] == 0
        case _:
            return False


class _ByteLevel:
    """Decodes tokens that stand for bytes. A character is returned when its bytes are complete."""

    num_waiting = 0

    def __init__(self) -> None:
        self._utf8 = _utf8_decoder()

    def feed(self, token: str) -> str:
        return self._utf8.decode(_token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def own_text(self, token: str) -> str:
        return _utf8_decoder().decode(_token_bytes(token))


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


@lru_cache(maxsize=1 << 16)
def _token_bytes(token: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in token)
    except KeyError:  # an added token is written as it is
        return token.encode()


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Return the table from characters to bytes. Byte-level tokenizers write a byte as itself if it is printable, and
    otherwise as a character from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class _Pieces:
    """Decodes tokens that stand for text or for a single byte. Consecutive bytes form one or more characters, or are
    all invalid. A later byte can change the meaning of earlier ones, so bytes wait for the next token that is text."""

    def __init__(self, decoder: Any, has_byte_tokens: bool) -> None:
        self._decoder = decoder
        self._has_byte_tokens = has_byte_tokens
        self._waiting: list[str] = []
        self._is_first = True
        self._utf8, self.num_waiting = _utf8_decoder(), 0

    def feed(self, token: str) -> str:
        self._waiting.append(token)
        if self._has_byte_tokens and BYTE_TOKEN.fullmatch(token):
            self.num_waiting += len(self._utf8.decode(bytes.fromhex(token[3:5])))
            return ""
        return self._take()

    def finish(self) -> str:
        return self._take()

    def own_text(self, token: str) -> str:
        text: str = self._decoder.decode([CONTEXT, token])
        return text[len(CONTEXT) :]

    def _take(self) -> str:
        tokens, self._waiting = self._waiting, []
        if len(tokens) > 1:  # bytes were among them
            self._utf8, self.num_waiting = _utf8_decoder(), 0
        inside: str = self._decoder.decode([CONTEXT, *tokens])[len(CONTEXT) :]
        if not (self._is_first and inside):
            return inside
        self._is_first = False  # only the first text of all may lose its leading space
        return self._decoder.decode(tokens)


@dataclass(frozen=True)
class Stopped:
    """The result of checking a run of tokens for stop strings: the text that can be shown, and whether a stop string
    ended it."""

    text: str
    stop: str | None  # the stop string that was found
    num_tokens: int  # tokens of this run that belong to the output: all of them, or up to the one that showed the stop


class StopStrings:
    """Finds the stop string that is complete first, also across pieces. Text that may be the beginning of a stop string
    is held back."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False, min_tokens: int = 0) -> None:
        assert all(stops), "a stop string must not be empty"
        self._stops = tuple(stops)
        self._longest = max((len(s) for s in self._stops), default=0)
        self._include_stop = include_stop
        self._num_unchecked = min_tokens  # tokens that are still to pass without a check
        self._held = ""

    def feed(self, pieces: Sequence[str]) -> Stopped:
        """Check the pieces of a run, one for each token, as a Detokenizer returns them."""
        out: list[str] = []
        for i, piece in enumerate(pieces):
            if self._num_unchecked > 0:
                self._num_unchecked -= 1
                out.append(piece)
                continue
            text, stop = self._check(piece)
            out.append(text)
            if stop is not None:
                return Stopped("".join(out), stop, i + 1)
        return Stopped("".join(out), None, len(pieces))

    def finish(self, tail: str = "") -> Stopped:
        """Check the text after the last token and return all that is left. `tail` is the text that the detokenizer held
        back."""
        text, stop = self._check(tail)
        if stop is None:
            text, self._held = text + self._held, ""
        return Stopped(text, stop, 0)

    def _check(self, piece: str) -> tuple[str, str | None]:
        text, self._held = self._held + piece, ""
        # The first to be complete wins, and of those that end together the longest: as if read by characters.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            return text[: end if self._include_stop else at], stop
        num_held = self._num_held(text)
        if num_held:
            text, self._held = text[:-num_held], text[-num_held:]
        return text, None

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix of the text that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
