"""Writes events of the prefix cache in vLLM's wire format (`vllm/distributed/kv_events.py`), as plain values for
msgpack.

A batch is a list of three items: the time, the events and the replica's number. An event is a map with its `type`.
Block hashes are 64-bit integers, as vLLM sends them by default: hashes of the pages' digests under a secret, because
from the digests themselves a subscriber could tell whether a prompt that it guesses was sent. A hash is BLAKE2b of the
page's 16-byte digest, 8 bytes long, keyed with the SHA-256 of `hash_secret`.

    message           topic, sequence number (8 bytes, big end first), msgpack of the batch
    BlockStored       block_hashes, parent_block_hash, token_ids, block_size, lora_id (from the digest of its files),
                      medium, lora_name, extra_keys (the adapter's name, and with `token_ids` salts of first blocks),
                      group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window, weights_version (after an update)
    BlockRemoved      block_hashes, medium, group_idx
    AllBlocksCleared  after a start, a sleep, a reset and a dropped batch; after a reset that leaves pages of running
                      requests, BlockRemoved of the others

A block is a page, so `block_size` can differ between groups. A group of kind `mamba` holds states of recurrent layers:
its blocks have no tokens, and their hash is that of the page of tokens that ends where the state was kept. Pages that
only drafters use are left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from os import urandom
from typing import Any, assert_never

from outrider.cache.events import WEIGHTS_KEY, AllRemoved, CacheEvent, PageRemoved, PageStored
from outrider.cache.groups import CacheLayout
from outrider.cache.kinds import ChunkedSpec, FullSpec, LatentSpec, PagedSpec

Event = dict[str, Any]
ADAPTER_KEY = re.compile(r"\w+=[0-9a-f]+")  # keys of adapters end in the digest of their files
ID_DIGITS = 7  # of the digest
# vLLM's names of media. GPU is the memory that the engine computes in, whatever the device.
MEDIA, STORAGE = {"": "GPU", "host": "CPU"}, "STORAGE"
HASH_BYTES = 8
STATES = "mamba"  # vLLM's name for groups of recurrent states


class EventWriter:
    """Writes the events of one model's cache in vLLM's wire format."""

    def __init__(self, layout: CacheLayout, *, tells_tokens: bool = False, secret: str | None = None) -> None:
        """tells_tokens: whether events contain the token ids of pages and the salts of requests. secret: the key of the
        hashes; None stands for a random key."""
        self._tells_tokens = tells_tokens
        self._key = urandom(32) if secret is None else hashlib.sha256(secret.encode()).digest()
        self._kinds = {group.index: _kind(group.spec) for group in layout.groups}
        self._sizes = {group.index: group.page_tokens for group in layout.groups}
        self._state_size = layout.recurrent.page_tokens

    def write(self, events: Iterable[CacheEvent]) -> list[Event]:
        """Convert events into the wire format. Consecutive events for pages that follow one another in a prompt, or
        that are removed together, are joined into one."""
        written: list[Event] = []
        last: tuple[type[CacheEvent], int, bytes, str] | None = None  # of the event before: type, group, digest, medium
        for event in events:
            match event:
                case AllRemoved():
                    written.append({"type": "AllBlocksCleared"})
                    last = None
                    continue
                case PageStored(group, digest, content, _, medium):
                    parent = None if content is None else content.parent
                    if content is not None and parent is not None and last == (PageStored, group, parent, medium):
                        written[-1]["block_hashes"].append(self._hash(digest))
                        written[-1]["token_ids"] += content.token_ids if self._tells_tokens else ()
                        if "extra_keys" in written[-1]:
                            written[-1]["extra_keys"].append(self._extra_keys(event))
                    else:
                        written.append(self._stored(event))
                case PageRemoved(group, digest, medium):
                    if last is not None and (last[0], last[1], last[3]) == (PageRemoved, group, medium):
                        written[-1]["block_hashes"].append(self._hash(digest))
                    else:
                        written.append({"type": "BlockRemoved", "block_hashes": [self._hash(digest)],
                                        "medium": MEDIA.get(medium, STORAGE), "group_idx": group})
                case _:
                    assert_never(event)
            last = type(event), group, digest, medium
        return written

    def _stored(self, event: PageStored) -> Event:
        content = event.content
        kind, window = self._kinds.get(event.group, (STATES, None))
        written: Event = {
            "type": "BlockStored", "block_hashes": [self._hash(event.digest)],
            "parent_block_hash": None if content is None or content.parent is None else self._hash(content.parent),
            "token_ids": list(content.token_ids) if content is not None and self._tells_tokens else [],
            "block_size": self._sizes.get(event.group, self._state_size),
            "lora_id": None, "lora_name": None, "medium": MEDIA.get(event.medium, STORAGE)}
        for key, label in event.labels:
            if ADAPTER_KEY.fullmatch(key):  # a number that stands for the adapter's files
                written |= {"lora_id": int(key.partition("=")[2][:ID_DIGITS], 16), "lora_name": label}
        for key in () if content is None else content.keys:
            if key.startswith(WEIGHTS_KEY):
                written["weights_version"] = int(key.removeprefix(WEIGHTS_KEY))
        if (keys := self._extra_keys(event)) is not None:
            written["extra_keys"] = [keys]
        written |= {"group_idx": event.group, "kv_cache_spec_kind": kind}
        if window is not None:
            written["kv_cache_spec_sliding_window"] = window
        return written

    def _extra_keys(self, event: PageStored) -> list[str] | None:
        """Return the keys, beside tokens, that are part of a block's hash: public names of keys in every block, and
        salts in the first block if events contain tokens."""
        content = event.content
        if content is None:
            return None
        labels = dict(event.labels)
        tells_salts = self._tells_tokens and content.parent is None
        hidden = [*labels, *(key for key in content.keys if key.startswith(WEIGHTS_KEY))]
        others = [key for key in content.keys if key not in hidden] if tells_salts else []
        return [*labels.values(), *(key.removeprefix("salt=") for key in others)] or None  # a salt as it was given

    def _hash(self, digest: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(digest, digest_size=HASH_BYTES, key=self._key).digest(), "big")


def _kind(spec: PagedSpec) -> tuple[str, int | None]:
    """Return vLLM's name for the kind of a group's cache, and the window that events report; None without one."""
    window = spec.visible_tokens
    if isinstance(spec, LatentSpec):
        return ("mla_attention" if window is None else "sliding_window_mla"), window
    if isinstance(spec, ChunkedSpec):
        return "chunked_local_attention", None
    if isinstance(spec, FullSpec):
        return ("full_attention" if window is None else "sliding_window"), window
    return "unknown", window
