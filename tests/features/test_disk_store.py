"""The disk cache of one process: what comes back, what is evicted, and who may read it."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from outrider.features.tiers.disk import CacheFolderError
from outrider.features.tiers.disk import shared_log as log_module
from outrider.features.tiers.disk.folder import CacheFolder
from outrider.features.tiers.disk.queue import StoreQueue
from tests.features.disk_cases import DOMAIN, bytes_in, get, key_of, object_files, opened, put

MIB = 1 << 20
PAGE = 60_000  # 15 units of 4 KiB with the header


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        for length in (0, 1, 4000, 4001, 100_000, 3 * MIB):
            assert put(store, key_of(length), length)
            assert store.contains(key_of(length)) and get(store, key_of(length), length), "before it is written"
        assert store.flush()
        assert not store._queue.pending
        for length in (0, 1, 4000, 4001, 100_000, 3 * MIB):
            assert store.contains(key_of(length)) and get(store, key_of(length), length)
        assert not store.contains(key_of(9)) and not get(store, key_of(9))
        stats = store.stats()
    assert (stats.stored, stats.loaded, stats.missed) == (6, 12, {"absent": 1})
    assert stats.num_bytes >= bytes_in(tmp_path / "cache")


def test_a_restart_finds_everything_from_the_log_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        for number in range(300):
            assert put(store, key_of(number))
    monkeypatch.setattr(log_module, "read_header", None)  # what walking the folder needs
    with opened(tmp_path / "cache") as store:
        assert all(store.contains(key_of(number)) and get(store, key_of(number)) for number in range(300))
        assert store.stats().num_objects == 300 and store._log.num_rebuilt == 0
        assert put(store, key_of(300))
        assert store.flush() and get(store, key_of(300))


def test_a_payload_is_copied_before_store_returns(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        payload = bytearray(b"a" * 5000)
        assert store.store(key_of(0), memoryview(payload))
        payload[:] = b"b" * 5000
        assert store.flush()
        into = bytearray(5000)
        assert store.load(key_of(0), memoryview(into)) and into == b"a" * 5000


def test_another_domain_has_other_objects(tmp_path: Path) -> None:
    other = bytes(31) + b"\1"
    with opened(tmp_path / "cache") as store, opened(tmp_path / "cache", domain=other) as second:
        assert put(store, key_of(0)) and store.flush() and second.flush()
        assert not second.contains(key_of(0)) and not get(second, key_of(0))
        own, = object_files(tmp_path / "cache")
        copy = tmp_path / "cache" / other.hex() / own.parent.name / own.name
        assert put(second, key_of(0)) and second.flush()
        copy.write_bytes(own.read_bytes())  # a whole object, but of another model
        assert not get(second, key_of(0)) and second.stats().missed["other object"] == 1


def test_an_object_of_another_key_or_length_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        put(store, key_of(0), 5000)
        put(store, key_of(1), 5000)
        assert store.flush() and not get(store, key_of(0), 4000) and not get(store, key_of(0), 6000)
        assert store.stats().missed == {"length": 2} and get(store, key_of(0), 5000)
        paths = {path.name: path for path in object_files(tmp_path / "cache")}
        paths[key_of(0).hex()].write_bytes(paths[key_of(1).hex()].read_bytes())
        assert not get(store, key_of(0), 5000) and store.stats().missed["other object"] == 1


def test_the_size_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", MIB) as store:
        for number in range(200):
            put(store, key_of(number))
            if number % 5 == 0:
                store.flush()
            assert bytes_in(tmp_path / "cache") <= MIB + (49 << 10)
            assert store.stats().num_bytes <= MIB + 4096
        assert store.flush()
        assert store.stats().evicted > 100 and get(store, key_of(199)) and not store.contains(key_of(0))
        held = [number for number in range(200) if store.contains(key_of(number))]
        assert held == list(range(held[0], 200)), "the least recently used went first"
        assert len(object_files(tmp_path / "cache")) == len(held)


def test_a_smaller_size_evicts_at_start(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", 8 * MIB) as store:
        for number in range(100):
            put(store, key_of(number), PAGE)
    with opened(tmp_path / "cache", MIB) as store:
        assert store.stats().num_bytes <= MIB and bytes_in(tmp_path / "cache") <= MIB + PAGE
        assert store.contains(key_of(99)) and not store.contains(key_of(0))


def test_interior_objects_are_evicted_first_and_promoted_by_a_hit(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", 2 * MIB) as store:
        for number in range(8):
            put(store, key_of(number), PAGE, boundary=True)
        for number in range(8, 16):
            put(store, key_of(number), PAGE)
        assert store.flush()
        store.touch(key_of(8))
        store.flush()
        for number in range(16, 50):  # room for 33 in all
            put(store, key_of(number), PAGE)
            store.flush()
        assert all(store.contains(key_of(number)) for number in range(9)), "boundaries, and the one that was hit"
        assert not any(store.contains(key_of(number)) for number in range(9, 25)) and store.contains(key_of(49))


def test_the_order_outlives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", 2 * MIB) as store:
        for number in range(20):
            put(store, key_of(number), PAGE, boundary=number < 2)
        assert store.flush()
        store.touch(key_of(2))
        store.pin([key_of(3)], time.time() + 1000)
        assert store.flush()
    with opened(tmp_path / "cache", 2 * MIB) as store:
        for number in range(100, 160):
            put(store, key_of(number), PAGE)
            store.flush()
        assert [number for number in range(20) if store.contains(key_of(number))] == [0, 1, 2, 3]


def test_pinned_objects_stay_until_their_time(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", 2 * MIB) as store:
        put(store, key_of(0), PAGE)
        put(store, key_of(1), PAGE)
        store.pin([key_of(0)], time.time() + 1000)  # while it may still be queued
        store.pin([key_of(1)], time.time() - 1)
        for number in range(100, 200):
            put(store, key_of(number), PAGE, boundary=True)
            store.flush()
        assert get(store, key_of(0), PAGE) and not store.contains(key_of(1))
        store.pin([key_of(0)], 0.0)
        for number in range(200, 300):
            put(store, key_of(number), PAGE, boundary=True)
            store.flush()
        assert not store.contains(key_of(0))


def test_pins_never_keep_the_cache_from_storing(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", 2 * MIB) as store:
        for number in range(100):
            assert put(store, key_of(number), PAGE)
            store.pin([key_of(number)], time.time() + 1000)
            store.flush()
        assert get(store, key_of(99), PAGE) and not store.stats().declined


def test_dropped_objects_are_gone_at_once_and_from_the_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        for number in range(4):
            put(store, key_of(number), PAGE)
        store.flush()
        put(store, key_of(4), PAGE)
        store.drop([key_of(0), key_of(4), key_of(77)])
        assert not store.contains(key_of(0)) and not get(store, key_of(0), PAGE)
        assert not store.contains(key_of(4)) and not get(store, key_of(4), PAGE)
        assert store.flush()
        assert len(object_files(tmp_path / "cache")) == 3
        assert put(store, key_of(0), PAGE) and get(store, key_of(0), PAGE) and store.flush()
        assert get(store, key_of(0), PAGE)
    with opened(tmp_path / "cache") as store:
        assert [store.contains(key_of(number)) for number in range(5)] == [True, True, True, True, False]


def test_the_log_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "SHORT_LOG", 20)
    with opened(tmp_path / "cache", MIB) as store, opened(tmp_path / "cache", MIB) as second:
        for number in range(200):
            put(store, key_of(number), PAGE, boundary=number % 2 == 0)
            store.flush()
            assert second.flush() and get(second, key_of(number), PAGE), "follows the new log"
        assert (tmp_path / "cache" / "index.log").stat().st_size < 100 * 72
        assert list(store._log.index.order.next_victims()) == list(second._log.index.order.next_victims())
    with opened(tmp_path / "cache", MIB) as store:
        assert store._log.num_rebuilt == 0 and get(store, key_of(199), PAGE)


def test_a_full_queue_declines_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "cache", queue_bytes=3 * PAGE) as store:
        with CacheFolder(tmp_path / "cache").locked(1):  # so the writer waits
            results = [put(store, key_of(number), PAGE) for number in range(10)]
            assert results == [True] * 3 + [False] * 7
            assert store.stats().declined == {"queue full": 7} and store.stats().queued_bytes == 3 * PAGE
        assert sum("queue full" in record.message for record in caplog.records) == 1
        assert store.flush() and all(get(store, key_of(number), PAGE) for number in range(3))
        assert put(store, key_of(20), 5 * PAGE), "a queue that is empty takes one object of any size"
        assert store.flush() and get(store, key_of(20), 5 * PAGE)


def test_close_is_bounded_and_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache", 512 * MIB, queue_bytes=512 * MIB) as store:
        for number in range(50):
            assert put(store, key_of(number), PAGE)
    assert not put(store, key_of(77), PAGE) and store.stats().declined == {"closed": 1}
    with opened(tmp_path / "cache") as again:
        assert all(get(again, key_of(number), PAGE) for number in range(50))
        monkeypatch.setattr("outrider.features.tiers.disk.writer.write_object",
                            lambda path, header, payload: time.sleep(0.2))
        for number in range(100, 140):
            assert put(again, key_of(number), PAGE)
        start = time.monotonic()
        again.close(timeout=0.3)
        assert time.monotonic() - start < 5 and again.stats().declined["closed"] > 30


def test_an_object_larger_than_half_of_the_cache_is_declined(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", MIB) as store:
        assert not put(store, key_of(0), MIB) and store.stats().declined == {"too large": 1}


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with opened(tmp_path / "cache", about={"model": "m"}) as store:
            put(store, key_of(0))
            store.flush()
            for top, folders, names in os.walk(tmp_path / "cache"):
                for name in folders:
                    assert stat.S_IMODE(os.lstat(os.path.join(top, name)).st_mode) == 0o700, name
                for name in names:
                    assert stat.S_IMODE(os.lstat(os.path.join(top, name)).st_mode) == 0o600, name
            assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_an_open_folder_of_the_user_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    with opened(tmp_path / "cache"):
        assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for path in (tmp_path / "link", tmp_path / "link" / "inside"):
        with pytest.raises(CacheFolderError, match=f"reached by a link.*give {tmp_path}/real"), opened(path):
            pass
    with opened(tmp_path / "real"):
        pass
    (tmp_path / "away").mkdir()
    (tmp_path / "real" / DOMAIN.hex()).rename(tmp_path / "away" / "domain")
    (tmp_path / "real" / DOMAIN.hex()).symlink_to(tmp_path / "away" / "domain")
    with pytest.raises(CacheFolderError, match="is a link"), opened(tmp_path / "real"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.raises(CacheFolderError, match="belongs to user 12345.*give a folder that this user owns"):
        with opened(tmp_path / "cache"):
            pass


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CacheFolderError, match="not a disk cache and not empty"), opened(tmp_path):
        pass
    with pytest.raises(CacheFolderError, match="is not a folder|Not a directory|File exists"):
        with opened(tmp_path / "thesis.tex"):
            pass


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too small"), opened(tmp_path / "cache", 1000):
        pass
    with pytest.raises(ValueError, match="a domain is a digest of 32 bytes"), opened(tmp_path / "c", domain=b"short"):
        pass
    with opened(tmp_path / "cache") as store, pytest.raises(ValueError, match="a key is a digest of 32 bytes"):
        store.store(b"short", memoryview(b"x"))


def test_what_is_gone_is_told_once(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", 2 * MIB) as store, opened(tmp_path / "cache", 2 * MIB) as second:
        for number in range(40):
            assert put(store, key_of(number), PAGE)
            assert store.flush()
        assert second.flush()
        gone = {key_of(number) for number in range(40) if not store.contains(key_of(number))}
        for each in (store, second):
            assert gone and set(each.take_evicted()) == gone and not each.take_evicted()


def test_what_could_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        assert put(store, key_of(1)) and store.flush() and not store.take_evicted()
        shutil.rmtree(tmp_path / "cache")
        assert put(store, key_of(2)) and store.flush()
        assert key_of(2) in store.take_evicted() and not store.contains(key_of(2))


def test_an_object_that_is_stored_again_is_served_until_it_is_written() -> None:
    """It was dropped while its first copy was being written."""
    queue, key = StoreQueue(MIB), key_of(1)
    assert queue.put(key, memoryview(b"first"), False) is None
    (first,), _ = queue.take(MIB, 0)
    queue.drop([key])
    assert queue.put(key, memoryview(b"second"), False) is None
    queue.finish(first)
    assert queue.pending[key].payload == b"second" and queue.num_bytes == len(b"second")
    (second,), _ = queue.take(MIB, 0)
    queue.finish(second)
    assert not queue.pending and queue.num_bytes == 0
