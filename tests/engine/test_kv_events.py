"""Events of the prefix cache: whoever follows them knows at every step what the cache holds, in vLLM's wire form."""

from __future__ import annotations

import functools
import hashlib
import logging
import queue
import socket
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.adapters import LoRARequest
from outrider.cache.events import AllRemoved, CacheEvents, PageContent, PageStored
from outrider.cache.groups import CacheLayout, LayerCache, plan_groups
from outrider.cache.kinds import ChunkedSpec, FullSpec, SlidingSpec
from outrider.cache.manager import CacheManager
from outrider.cache.prefix import PageHashes
from outrider.config import EngineConfig, KVEventsConfig
from outrider.engine import kv_events
from outrider.engine.assembly import engine_around
from outrider.engine.kv_event_wire import EventWriter
from outrider.engine.kv_events import EventSockets, KvEvents, with_rank
from outrider.engine.maintenance import Maintenance
from outrider.features.adapters.loads import AdapterRegistry
from outrider.models.base import Model
from outrider.runner.worker import Worker
from tests.adapters.folders import write_adapter
from tests.engine.harness import Ask, Rig, add_request, greedy, prompt_of, tiny_model
from tests.engine.recurrent_rig import hybrid

MODELS: dict[str, Callable[[], Model]] = {
    "llama": functools.partial(tiny_model, "llama"), "gemma3": functools.partial(tiny_model, "gemma3"),
    "mamba2": functools.partial(hybrid, "mamba2")}
NUM_PAGES = {"llama": 18, "gemma3": 24, "mamba2": 40}  # so few that some are evicted
WIRE = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}


SECRET = "shared with routers"


def hash_of(digest: bytes) -> int:
    """The hash of a page under SECRET, as kv_event_wire.py says it."""
    key = hashlib.sha256(SECRET.encode()).digest()
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8, key=key).digest(), "big")


def writer_of_all(layout: CacheLayout) -> EventWriter:
    return EventWriter(layout, tells_tokens=True, secret=SECRET)


class Subscriber:
    """Rebuilds the set of cached blocks from events alone, as a router does."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, int]] = set()  # group and hash
        self.kinds: dict[int, tuple[str, int | None]] = {}
        self.num_removed = self.num_cleared = 0
        self._prefixes: dict[tuple[int, int], list[int]] = {}  # all tokens up to a block's end

    def read(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            assert event.keys() <= WIRE
            match event["type"]:
                case "AllBlocksCleared":
                    self.blocks.clear()
                    self.num_cleared += 1
                case "BlockRemoved":
                    removed = {(event["group_idx"], block) for block in event["block_hashes"]}
                    assert removed <= self.blocks, "a block is removed that was not there"
                    self.blocks -= removed
                    self.num_removed += len(removed)
                case "BlockStored":
                    self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        group, size, parent = event["group_idx"], event["block_size"], event["parent_block_hash"]
        self.kinds[group] = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
        stored = {(group, block) for block in event["block_hashes"]}
        assert not stored & self.blocks, "a block is stored that was there"
        self.blocks |= stored
        if event["kv_cache_spec_kind"] == "mamba":
            return
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        prefix = [] if parent is None else self._prefixes[group, parent]
        for i, block in enumerate(event["block_hashes"]):
            prefix = prefix + event["token_ids"][i * size : (i + 1) * size]
            digest = PageHashes(size, ()).upto(prefix, len(prefix) // size)[-1]
            assert block == hash_of(digest), "the tokens are not those of the block"
            self._prefixes[group, block] = prefix


def cached_blocks(cache: CacheManager) -> set[tuple[int, int]]:
    """The blocks that the engine itself can find."""
    targets = {group.index for group in cache.groups if group.is_target}
    keys = [key for key in cache.pool._page_of if key[0] in targets]
    keys += [(len(cache.groups), digest) for digest in cache.states._pages_of if cache.states.find(digest) is not None]
    return {(group, hash_of(digest)) for group, digest in keys}


class Followed:
    """An engine whose events are read after every step and compared with its cache."""

    def __init__(self, model: Model, **settings: Any) -> None:
        self.rig = Rig(model, **settings)
        self.cache = self.rig.scheduler.cache
        self.record = self.cache.pool.events = CacheEvents(self.cache.layout)
        self.writer, self.subscriber = writer_of_all(self.cache.layout), Subscriber()

    def compare(self) -> None:
        self.subscriber.read(self.writer.write(self.record.take()))
        assert self.subscriber.blocks == cached_blocks(self.cache)

    def load(self, random: Random, num_asks: int) -> None:
        asks = [Ask(prompt_of(random.randrange(8), 60)[: random.randrange(8, 60)],
                    greedy(random.randrange(1, 20), ignore_eos=True)) for _ in range(num_asks)]
        self.rig.run(asks, after_step=self.compare)
        self.compare()


@pytest.mark.parametrize("name", MODELS)
def test_a_subscriber_knows_what_the_cache_holds(name: str) -> None:
    followed = Followed(MODELS[name](), num_pages=NUM_PAGES[name], max_num_seqs=3, checkpoint_interval=16)
    random = Random(name)
    for _ in range(3):
        followed.load(random, 6)
    assert followed.subscriber.num_removed > 0 and followed.subscriber.blocks, "nothing was evicted"
    engine = followed.rig.engine
    assert engine.forget_cached()
    followed.compare()
    assert not followed.subscriber.blocks and followed.subscriber.num_cleared == 1
    followed.load(random, 3)
    Maintenance(engine).sleep()
    followed.compare()
    Maintenance(engine).wake_up()
    assert not followed.subscriber.blocks
    kinds = {"llama": {0: ("full_attention", None)},
             "mamba2": {0: ("full_attention", None), 1: ("mamba", None)}}.get(name)
    if kinds is None:
        assert set(followed.subscriber.kinds.values()) == {("sliding_window", 20), ("full_attention", None)}
    else:
        assert followed.subscriber.kinds == kinds


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_subscriber_follows_random_loads(name: str, drafts: bool, seed: int) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
    random = Random(seed)
    followed = Followed(MODELS[name](), num_pages=random.choice([2, 3]) * NUM_PAGES[name] // 2,
                        max_num_seqs=random.choice([2, 4]), checkpoint_interval=random.choice([16, 48]),
                        overlap=random.random() < 0.5, speculative_config=ngram if drafts else None)
    for _ in range(6):
        followed.load(random, random.randrange(1, 10))
        match random.randrange(8):
            case 0:
                followed.rig.engine.forget_cached()
            case 1:
                followed.rig.engine.rest()
        followed.compare()
    assert followed.subscriber.kinds


def test_pages_held_by_requests_survive_a_reset_and_salts_are_told() -> None:
    followed = Followed(tiny_model("llama", torch.float32))
    rig = followed.rig
    asked = {"prompt_token_ids": prompt_of(1, 40), "cache_salt": "pepper"}
    add_request(rig.engine, "salted", asked, greedy(20, ignore_eos=True))
    while not cached_blocks(followed.cache):
        rig.engine.step()
    (event,) = followed.writer.write(followed.record.take())
    assert event["extra_keys"] == [["pepper"], None] and len(event["block_hashes"]) == 2
    assert not rig.engine.forget_cached() and followed.record.take() == []


def test_pages_of_an_adapter_are_told_with_its_name(tmp_path: Path) -> None:
    """A router would otherwise send requests without the adapter, or with another one, where they find nothing."""
    model = tiny_model("llama", torch.float32)
    write_adapter(tmp_path / "sql", model, 1)
    with Rig(model, enable_lora=True, max_loras=2, max_lora_rank=8) as rig:
        registry, cache = rig.engine.keepers.find(AdapterRegistry), rig.scheduler.cache
        assert registry is not None
        record = cache.pool.events = CacheEvents(cache.layout, registry._labels)
        llm, writer = LLM.around(rig.engine), writer_of_all(cache.layout)

        def stored(prompt: list[int], adapter: LoRARequest | None, **more: Any) -> list[dict[str, Any]]:
            asked = {"prompt_token_ids": prompt, **more}
            llm.generate([asked], greedy(20, ignore_eos=True), lora_request=adapter, use_tqdm=False)
            return [event for event in writer.write(record.take()) if event["type"] == "BlockStored"]

        sql = LoRARequest("sql", 7, str(tmp_path / "sql"))
        prompt = prompt_of(1, 40)
        plain, adapted, salted = stored(prompt, None), stored(prompt, sql), stored(prompt, sql, cache_salt="pepper")
        adapted += stored([*prompt[:32], *prompt_of(2, 20)], sql)
        assert {(event["lora_id"], event["lora_name"]) for event in plain} == {(None, None)}
        assert not any("extra_keys" in event for event in plain)
        assert adapted[-1]["parent_block_hash"] == adapted[0]["block_hashes"][1], "the first two pages are a hit"
        (load,) = registry._loads.values()
        number = int(load.digest[:7], 16)
        for event in (*adapted, *salted):
            assert (event["lora_id"], event["lora_name"]) == (number, "sql")
        assert all(event["extra_keys"] == [["sql"]] * len(event["block_hashes"]) for event in adapted)
        assert salted[0]["extra_keys"][:2] == [["sql", "pepper"], ["sql"]]
        assert not {*plain[0]["block_hashes"]} & {*adapted[0]["block_hashes"]}


def test_labels_of_other_features_are_told_and_versions_of_weights_by_themselves() -> None:
    keys = ("weights=3", "scaled=half", "salt=pepper")
    writer = writer_of_all(layout_of_two())
    (event,) = writer.write([PageStored(0, bytes(16), PageContent(None, (1, 2), keys), (("scaled=half", "halved"),))])
    assert (event["lora_id"], event["lora_name"]) == (None, None) and event["extra_keys"] == [["halved", "pepper"]]
    assert event["weights_version"] == 3
    (first,) = writer.write([PageStored(0, bytes(16), PageContent(None, (1, 2), keys[1:]))])
    assert "weights_version" not in first


def layout_of_two() -> Any:
    return plan_groups([LayerCache(0, FullSpec(2, 8, 4)), LayerCache(1, SlidingSpec(2, 8, 4, 32))], 16)


def test_a_group_of_chunked_layers_is_named_as_such() -> None:
    writer = EventWriter(plan_groups([LayerCache(0, ChunkedSpec(2, 8, 4, 32))], 16))
    (event,) = writer.write([PageStored(0, bytes(16), PageContent(None, (1, 2), ()))])
    assert event["kv_cache_spec_kind"] == "chunked_local_attention" and "kv_cache_spec_sliding_window" not in event


def test_blocks_in_a_row_share_an_event_and_others_do_not() -> None:
    writer = writer_of_all(layout_of_two())
    digests = [bytes([i]) * 16 for i in range(4)]
    pages = [PageStored(0, digests[0], PageContent(None, (1, 2), ())),
             PageStored(0, digests[1], PageContent(digests[0], (3, 4), ())),
             PageStored(0, digests[3], PageContent(digests[2], (7, 8), ())), AllRemoved(),
             PageStored(1, digests[1], PageContent(digests[0], (3, 4), ()))]
    first, second, cleared, other = writer.write(pages)
    assert first["token_ids"] == [1, 2, 3, 4] and len(first["block_hashes"]) == 2
    assert second["parent_block_hash"] == hash_of(digests[2])
    assert cleared == {"type": "AllBlocksCleared"} and other["group_idx"] == 1


@pytest.mark.parametrize(("given", "words"), [
    ({"enable_kv_cache_event": True}, "did you mean enable_kv_cache_events"),
    ({"publisher": "kafka"}, "kv_events_config: publisher must be"), ({"hwm": 0}, "hwm"),
    ({"endpoint": ""}, "endpoint"),
    ({"endpoint": "tcp://*:0"}, "needs a port from 1 to 65535"),
    ({"replay_endpoint": "tcp://*:0"}, "replay_endpoint 'tcp://.*:0' needs a port"),
    ({"endpoint": "tcp://*:70000"}, "needs a port"),
    ({"endpoint": "tcp://*:65535", "data_parallel_rank": 1}, "less the replica's number 1"),
])
def test_a_config_that_cannot_work_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig("tiny", kv_events_config=given)


def test_events_are_off_unless_they_are_asked_for() -> None:
    assert EngineConfig("tiny", kv_events_config={"endpoint": "tcp://*:1"}).kv_events is None
    given = {"enable_kv_cache_events": True}
    assert EngineConfig("tiny", kv_events_config=given | {"publisher": "null"}).kv_events is None
    assert EngineConfig("tiny", kv_events_config=given).kv_events == KVEventsConfig(True)
    assert Rig(tiny_model("llama", torch.float32)).scheduler.cache.pool.events is None


def test_events_tell_no_prompts_unless_they_are_asked_to() -> None:
    """Neither tokens, nor salts, nor hashes that a subscriber could compute for a prompt which it guesses."""
    digest = PageHashes(2, ("salt=pepper",)).upto([1, 2], 1)[0]
    stored = PageStored(0, digest, PageContent(None, (1, 2), ("salt=pepper", "adapter=7")), (("adapter=7", "sql"),))
    first, second = ([EventWriter(layout_of_two()).write([stored, stored])] for _ in range(2))
    for event in (*first[0], *second[0]):
        assert event["token_ids"] == [] and event["extra_keys"] == [["sql"]] and event["lora_name"] == "sql"
        assert not {int.from_bytes(digest[i : i + 8], order) for i in (0, 8) for order in ("big", "little")} & {
            *event["block_hashes"]}
    assert first[0][0]["block_hashes"] != second[0][0]["block_hashes"], "each process has a secret of its own"
    (told,) = writer_of_all(layout_of_two()).write([stored])
    assert told["token_ids"] == [1, 2] and told["extra_keys"] == [["sql", "pepper"]]


def test_events_stay_on_this_machine_unless_an_address_is_given(caplog: pytest.LogCaptureFixture,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    assert KVEventsConfig(True).endpoint == "tcp://127.0.0.1:5557" and KVEventsConfig(True).is_bound
    for endpoint, is_bound in [("tcp://*:5557", True), ("tcp://[::]:5557", True), ("ipc:///tmp/x", True),
                               ("tcp://router:5557", False), ("tcp://127.0.0.1:9", False)]:
        assert KVEventsConfig(True, endpoint=endpoint).is_bound == is_bound
    assert KVEventsConfig(True, endpoint="tcp://127.0.0.1:9", bind=True).is_bound
    for endpoint, warns in [("tcp://localhost:1", False), ("tcp://router.example:1", True)]:
        EventSockets(KVEventsConfig(True, endpoint=endpoint, token_ids=True)).close()
        assert ("token ids of all prompts and answers" in caplog.text) == warns


def test_replicas_publish_at_addresses_of_their_own() -> None:
    assert with_rank("tcp://*:5557", 0) == "tcp://*:5557" and with_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert with_rank("ipc:///tmp/events", 1) == "ipc:///tmp/events_dp1"
    with pytest.raises(ValueError, match="needs a port"):
        with_rank("tcp://host", 1)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ValueError, match=r"pip install 'outrider\[events\]'"):
        EventSockets(KVEventsConfig(True))


class Wire:
    """A publisher and a subscriber at addresses of this process's machine."""

    def __init__(self, tmp_path: Any, **settings: Any) -> None:
        zmq, self.msgpack = pytest.importorskip("zmq"), pytest.importorskip("msgpack")
        replay = f"ipc://{tmp_path}/r"
        self.address = f"ipc://{tmp_path}/p"
        config = KVEventsConfig(True, endpoint=self.address, replay_endpoint=replay, topic="kv", token_ids=True,
                                hash_secret=SECRET, **settings)
        self.events = KvEvents(layout_of_two(), EventSockets(config))
        self.context = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.connect(self.address)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.connect(replay)
        self.subscriber.RCVTIMEO = self.asking.RCVTIMEO = 30_000

    def publish(self, i: int) -> None:
        self.events.record.store_page((0, bytes([i]) * 16), PageContent(None, (i,) * 16, ()))
        self.events.flush()

    def connect(self) -> None:
        """Returns when the subscriber gets what is published."""
        while not self.subscriber.poll(50):
            self.publish(0)
        time.sleep(0.1)
        while self.subscriber.poll(100):
            self.subscriber.recv_multipart()

    def replayed(self, number: int) -> list[tuple[int, Any]]:
        self.asking.send_multipart((b"", number.to_bytes(8, "big")))
        found = []
        while True:
            _, _, numbered, payload = self.asking.recv_multipart()
            if int.from_bytes(numbered, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(numbered, "big"), self.msgpack.unpackb(payload)))

    def close(self) -> None:
        self.events.close()
        self.context.destroy(linger=0)


def test_batches_are_numbered_packed_and_replayed(tmp_path: Any) -> None:
    wire = Wire(tmp_path, data_parallel_rank=0, buffer_steps=3)
    wire.connect()
    wire.publish(7)
    topic, numbered, payload = wire.subscriber.recv_multipart()
    number, (seconds, (event,), rank) = int.from_bytes(numbered, "big"), wire.msgpack.unpackb(payload)
    assert topic == b"kv" and rank == 0 and abs(seconds - time.time()) < 600
    assert event == {"type": "BlockStored", "block_hashes": [hash_of(bytes([7]) * 16)],
                     "parent_block_hash": None, "token_ids": [7] * 16, "block_size": 16, "lora_id": None,
                     "medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    for i in range(8, 12):
        wire.publish(i)
    while wire.subscriber.poll(200):
        last = int.from_bytes(wire.subscriber.recv_multipart()[1], "big")
    assert last == number + 4
    found = wire.replayed(0)
    assert [each for each, _ in found] == [number + 2, number + 3, number + 4], "the last three are kept"
    assert found[-1][1][1][0]["token_ids"] == [11] * 16
    assert [each for each, _ in wire.replayed(number + 4)] == [number + 4]
    wire.close()
    with pytest.raises(ValueError, match="cannot publish at ipc:///no/such/folder/p"):
        EventSockets(KVEventsConfig(True, endpoint="ipc:///no/such/folder/p"))


def test_a_full_queue_drops_batches_and_tells_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events.KvEvents, "_run", lambda self: None)  # a thread that does not get on
    wire = Wire(tmp_path, max_queue_size=2)
    for i in range(4):
        wire.publish(i)
    assert wire.events.num_dropped == 2
    waiting: queue.Queue[Any] = wire.events._batches
    assert [waiting.get()[0] for _ in range(2)] == [0, 1]
    wire.publish(4)
    number, _, events = waiting.get()
    assert number == 4 and isinstance(events[0], AllRemoved) and len(events) == 2
    wire.context.destroy(linger=0)


def test_an_engine_publishes_its_cache_and_gives_its_address_up(tmp_path: Any) -> None:
    zmq, msgpack = pytest.importorskip("zmq"), pytest.importorskip("msgpack")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}", "bind": True, "token_ids": True,
             "replay_endpoint": f"ipc://{tmp_path}/r", "hash_secret": SECRET}
    config = EngineConfig("tiny", device="cpu", dtype="float32", max_model_len=96, num_pages=64, kv_events_config=given)
    assert config.kv_events is not None
    for _ in range(2):  # the second takes the address that the first had
        worker = Worker(config, tiny_model("llama", torch.float32))
        with LLM.around(engine_around(config, worker, event_sockets=EventSockets(config.kv_events))) as llm:
            llm.generate([prompt_of(1, 50), prompt_of(2, 70)], greedy(20, ignore_eos=True), use_tqdm=False)
            with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
                asking.RCVTIMEO = 30_000
                asking.connect(f"ipc://{tmp_path}/r")
                subscriber, numbered = Subscriber(), b""
                wanted = cached_blocks(llm.engine.scheduler.cache)
                end = time.monotonic() + 60
                while subscriber.blocks != wanted:  # the publishing thread may still be at it
                    assert time.monotonic() < end, "the events do not tell what the cache holds"
                    asking.send_multipart((b"", (0).to_bytes(8, "big")))
                    subscriber = Subscriber()
                    while (message := asking.recv_multipart())[2] != b"\xff" * 8:
                        numbered, payload = message[2:]
                        subscriber.read(msgpack.unpackb(payload)[1])
            assert subscriber.num_cleared == 1 and int.from_bytes(numbered, "big") > 1
