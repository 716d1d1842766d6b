"""Sessions: the pages of a conversation are kept first for a while, within bounds, and dropped on request."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from outrider.cache import sessions
from outrider.cache.sessions import CacheSession, CacheSessions
from outrider.core.outputs import RequestOutput
from outrider.core.page_moves import PagePin
from outrider.features.tiers.disk import DiskStore
from outrider.features.tiers.host_store import HostStore
from outrider.features.tiers.tiers_in_engine import drop_session
from outrider.llm import LLM
from tests.engine.harness import Rig, greedy, prompt_of
from tests.tiers.rigs import HOST_BYTES, KINDS, answers_of, assert_equal, stats_of

PAGES = 24  # of the host's memory
FAMILIES = ("full", "full and sliding", "mamba2", "gated delta, mtp")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


def ask(rig: Rig, seed: int, *, vocab: int = 256, **prompt: Any) -> RequestOutput:
    given = {"prompt_token_ids": prompt_of(seed, 70, vocab)} | prompt
    (output,) = LLM.around(rig.engine).generate([given], greedy(4, logprobs=2), use_tqdm=False)
    return output


def is_found(rig: Rig, seed: int, vocab: int = 256) -> bool:
    """Whether another place has the prompt's pages."""
    rig.engine.rest()
    before = sum(stats_of(rig).num_loaded.values())
    ask(rig, seed, vocab=vocab)
    return sum(stats_of(rig).num_loaded.values()) > before


@pytest.mark.parametrize("name", FAMILIES)
def test_pages_of_a_session_stay_while_others_come(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    with kind.open(tmp_path) as rig:
        page = rig.step.pool.layout.page_bytes
        state = rig.scheduler.cache.checkpoints.capacity.checkpoint_pages
    expected = {}
    for session in (None, "mine"):
        named: dict[str, Any] = {} if session is None else {"cache_session": session}
        with kind.open(tmp_path, host_cache_memory=(PAGES + 8 * state) * page) as rig:
            first = ask(rig, 1, vocab=kind.vocab, **named)
            for seed in range(10, 24):
                ask(rig, seed, vocab=kind.vocab)
            found = is_found(rig, 1, kind.vocab)
            assert found is (session is not None), "the session makes no difference"
            again = ask(rig, 1, vocab=kind.vocab, **named)
            assert_equal(answers_of([again]), answers_of([first]))
            expected[session] = answers_of([first])
    assert expected[None] == expected["mine"], "a session is no part of the keys"


def test_requests_find_pages_of_other_sessions(tmp_path: Path) -> None:
    with KINDS["full"].open(tmp_path, host_cache_memory=HOST_BYTES) as rig:
        ask(rig, 1, cache_session="a")
        assert ask(rig, 1, cache_session="b").num_cached_tokens == 64
        assert ask(rig, 1).num_cached_tokens == 64


@pytest.mark.parametrize("tiers", ["host", "disk", "both"])
def test_a_session_is_dropped(tiers: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {} if tiers == "disk" else {"host_cache_memory": HOST_BYTES}
    if tiers != "host":
        settings["disk_cache_dir"] = str(tmp_path / "cache")
    with KINDS["full"].open(tmp_path, **settings) as rig:
        ask(rig, 1)
        for seed in (1, 2, 3):
            ask(rig, seed, cache_session="mine")
        ask(rig, 3, cache_session="other")
        assert not drop_session(rig.engine, "nobody's") and not drop_session(rig.engine, ("tenant", "mine"))
        assert drop_session(rig.engine, "mine") and not drop_session(rig.engine, "mine")
        rig.run([])
        assert rig.scheduler.cache.stats.hit_tokens
        assert ask(rig, 2).num_cached_tokens == 64, "only the last turn's pages belong to a session"
        assert is_found(rig, 1), "pages that were there before the session are dropped"
        assert is_found(rig, 3), "pages of another session are dropped"
    with KINDS["full"].open(tmp_path, **settings) as rig:
        ask(rig, 4, cache_session="mine")
        assert drop_session(rig.engine, "mine")
        assert ask(rig, 4).num_cached_tokens == 0, "the device finds what was dropped"
        ask(rig, 5, cache_session="mine")
        rig.engine.rest()
        assert drop_session(rig.engine, "mine")
        rig.run([])
        assert not is_found(rig, 5)


def test_names_that_are_refused(tmp_path: Path) -> None:
    with KINDS["full"].open(tmp_path) as rig:
        for name in ("", "x" * 201):
            with pytest.raises(ValueError, match="cache_session must have from 1 to 200 characters"):
                ask(rig, 1, cache_session=name)
        with pytest.raises(ValueError, match="cache_session"):
            ask(rig, 1, cache_session=5)
        assert ask(rig, 1, cache_session="without a tier").outputs and not drop_session(rig.engine, "without a tier")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sessions, "time", clock)
    return clock


def keys(prefix: str, count: int) -> dict[bytes, Any]:
    return {f"{prefix}{index}".encode(): None for index in range(count)}


def always(key: bytes) -> bool:
    return True


def pinned_by(kept: CacheSessions, before: set[bytes]) -> set[bytes]:
    """The keys that are pinned when these orders have been carried out."""
    for pin in kept.take_orders().pins:
        before = before | set(pin.keys) if pin.until else before - set(pin.keys)
    return before


def test_one_owner_cannot_pin_everything(clock: Clock) -> None:
    kept = CacheSessions(40)  # pages of one byte: 10 for each owner, 20 for all
    pinned: set[bytes] = set()
    for turn in range(5):
        kept.extend(CacheSession("a", str(turn)), keys(f"a{turn} ", 4), always)
        pinned = pinned_by(kept, pinned)
        assert kept.num_pages == len(pinned) <= 10
    assert pinned == keys("a4 ", 4).keys() | keys("a3 ", 4).keys()
    kept.extend(CacheSession("a", "long"), keys("long ", 30), always)
    pinned = pinned_by(kept, pinned)
    assert pinned == {f"long {index}".encode() for index in range(20, 30)}, "the end of the text is not let go first"
    for owner in "bcd":
        kept.extend(CacheSession(owner, "x"), keys(owner, 8), always)
        pinned = pinned_by(kept, pinned)
        assert kept.num_pages == len(pinned) <= 20
    assert pinned == keys("c", 8).keys() | keys("d", 8).keys()


def test_sessions_end_with_their_time(clock: Clock) -> None:
    kept, one = CacheSessions(4000), CacheSession("", "one")
    kept.extend(one, keys("a", 3), always)
    (pin,) = kept.take_orders().pins
    assert pin.until == 1000 + sessions.PIN_SECONDS
    clock.now += 100
    kept.extend(one, keys("a", 5), always)
    assert kept.take_orders().pins == [PagePin((b"a3", b"a4"), pin.until)], "pages are pinned again without need"
    clock.now += sessions.SESSION_SECONDS
    kept.extend(one, keys("a", 5), always)
    (again,) = kept.take_orders().pins
    assert len(again.keys) == 5 and again.until == clock.now + sessions.PIN_SECONDS
    clock.now += sessions.SESSION_SECONDS
    kept.extend(CacheSession("", "two"), keys("b", 1), always)
    assert pinned_by(kept, set(again.keys)) == {b"b0"} and kept.num_pages == 1


def test_pages_are_pinned_or_dropped_when_they_are_stored(clock: Clock) -> None:
    kept, one = CacheSessions(4000), CacheSession("", "one")
    kept.extend(one, keys("a", 2), lambda key: key == b"a1")
    assert pinned_by(kept, set()) == {b"a1"}
    kept.note_stored(b"a0")
    assert pinned_by(kept, set()) == {b"a0"}
    kept.extend(one, keys("a", 3), lambda key: key != b"a2")
    assert kept.drop(one, lambda key: key != b"a2") == keys("a", 3)
    assert kept.take_orders().dropped == [b"a0", b"a1"]
    kept.note_stored(b"a2")
    assert kept.take_orders().dropped == [b"a2"]


def test_both_stores_keep_pins(tmp_path: Path) -> None:
    host = HostStore(4000, cell_bytes=1000)
    disk = DiskStore(tmp_path / "cache", bytes(32), 1 << 20)
    for store in (host, disk):
        names = [bytes([number]) * 32 for number in range(60)]
        size = 1000 if store is host else 40_000
        for number, name in enumerate(names):
            assert store.store(name, memoryview(bytes(size)), boundary=True)
            if number == 0:
                assert store is host or disk.flush()
                store.pin([name], time.time() + 100)
        assert store is host or disk.flush()
        assert store.contains(names[0]) and not store.contains(names[1])
    disk.close()
