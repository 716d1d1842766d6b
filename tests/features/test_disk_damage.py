"""Damaged files, full disks and errors of the system cost hits, never answers."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.features.tiers.disk import object_file
from outrider.features.tiers.disk.folder import CacheFolder
from outrider.features.tiers.disk.object_file import HEADER_BYTES
from outrider.features.tiers.disk.records import RECORD_BYTES
from tests.features.disk_cases import bytes_in, get, key_of, object_files, opened, put

LENGTH = 200
WRITER = "outrider.features.tiers.disk.writer"


def test_every_flipped_bit_of_an_object_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits of the header, and one bit of each byte of the payload."""
    with opened(tmp_path / "cache") as store:
        monkeypatch.setattr(store._queue, "suspect", lambda key: None)  # else the first miss removes it
        put(store, key_of(0), LENGTH)
        store.flush()
        path, = object_files(tmp_path / "cache")
        whole = path.read_bytes()
        assert len(whole) == HEADER_BYTES + LENGTH
        bits = [*range(8 * HEADER_BYTES), *range(8 * HEADER_BYTES + 3, 8 * len(whole), 8)]
        for bit in bits:
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            assert not get(store, key_of(0), LENGTH), f"bit {bit}"
            path.write_bytes(whole)
        assert get(store, key_of(0), LENGTH), "it was the flipped bit"
        assert sum(store.stats().missed.values()) == len(bits)
        assert store.stats().missed.keys() == {"header", "checksum"}


def test_every_shorter_file_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        monkeypatch.setattr(store._queue, "suspect", lambda key: None)
        put(store, key_of(0), LENGTH)
        store.flush()
        path, = object_files(tmp_path / "cache")
        whole = path.read_bytes()
        for count in range(len(whole)):
            path.write_bytes(whole[:count])
            assert not get(store, key_of(0), LENGTH), f"{count} bytes"
        assert store.stats().missed == {"truncated": len(whole)}


def test_a_damaged_object_is_removed_and_can_be_stored_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "cache") as store, opened(tmp_path / "cache") as second:
        for number in range(5):
            put(store, key_of(number), LENGTH)
        assert store.flush() and second.flush()
        for path in object_files(tmp_path / "cache"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        for number in range(5):
            assert not get(second, key_of(number), LENGTH) and not second.contains(key_of(number))
        assert second.flush() and not object_files(tmp_path / "cache")
        assert store.flush() and not store.contains(key_of(0))
        assert put(store, key_of(0), LENGTH) and store.flush() and second.flush()
        assert get(second, key_of(0), LENGTH)
    assert sum("(checksum)" in record.message for record in caplog.records) == 1, "one line, not one a page"


def test_a_deleted_object_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        put(store, key_of(0))
        store.flush()
        object_files(tmp_path / "cache")[0].unlink()
        assert store.contains(key_of(0)) and not get(store, key_of(0)) and not store.contains(key_of(0))
        assert store.flush() and store.stats().num_objects == 0 and store.stats().missed == {"evicted": 1}


def test_every_flipped_byte_of_the_index_is_seen(tmp_path: Path) -> None:
    """The log is made anew from the folder: everything is found, and the bytes that count are those of the disk."""
    folder = tmp_path / "cache"
    with opened(folder) as store:
        for number in range(3):
            put(store, key_of(number), LENGTH, boundary=True)
        store.flush()
        count = store.stats().num_bytes
    log = folder / "index.log"
    whole = log.read_bytes()
    assert len(whole) >= 7 * RECORD_BYTES
    for place in range(len(whole)):
        log.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1:])
        with opened(folder) as store:
            assert store._log.num_rebuilt == 1, f"byte {place}"
            assert all(get(store, key_of(number), LENGTH) for number in range(3)), f"byte {place}"
            assert store.stats().num_objects == 3 and len(store._log.index.order.kept) == 3
            assert store.stats().num_bytes <= count


@pytest.mark.parametrize("left", [0, 1, RECORD_BYTES - 1, RECORD_BYTES, 5 * RECORD_BYTES + 7, None])
def test_a_torn_or_missing_index_is_made_anew(tmp_path: Path, left: int | None) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as store:
        for number in range(20):
            put(store, key_of(number), LENGTH)
    log = folder / "index.log"
    if left is None:
        log.unlink()
    else:
        log.write_bytes(log.read_bytes()[:left])
    (folder / "tmp" / "garbage").write_bytes(b"half of an object")
    with opened(folder) as store:
        store.flush()  # a log that ends too early where a record ends looks whole: the folder is listed after the start
        assert all(get(store, key_of(number), LENGTH) for number in range(20))
        assert not list((folder / "tmp").iterdir())
    with opened(folder) as store:
        assert store._log.num_rebuilt == 0 and store.stats().num_objects == 20


def test_an_index_that_is_damaged_while_engines_run_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as store, opened(folder) as second:
        for number in range(10):
            put(store, key_of(number), LENGTH)
        assert store.flush() and second.flush()
        with open(folder / "index.log", "ab") as log:
            log.write(b"half a record")
        for number in range(10, 20):
            put(second, key_of(number), LENGTH)
        assert second.flush() and store.flush()
        (folder / "index.log").unlink()
        put(store, key_of(20), LENGTH)
        assert store.flush() and second.flush()
        for each in (store, second):
            assert all(get(each, key_of(number), LENGTH) for number in range(21))


def test_errors_of_the_system_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        put(store, key_of(0))
        put(store, key_of(1))
        store.flush()
        for code, is_kept in ((errno.EMFILE, True), (errno.EIO, False)):
            def fail(*args: object, code: int = code) -> None:
                raise OSError(code, os.strerror(code))

            monkeypatch.setattr(object_file.os, "readv", fail)
            assert not get(store, key_of(0)) and store.contains(key_of(0)) == is_kept
            monkeypatch.undo()
        assert store.stats().missed == {"I/O error": 2} and get(store, key_of(1))


def test_files_that_the_index_does_not_know_are_found_and_count(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as store:
        for number in range(40):
            put(store, key_of(number), 100_000)
    log = folder / "index.log"
    log.write_bytes(log.read_bytes()[:RECORD_BYTES])
    object_files(folder)[0].write_bytes(b"what is no object")
    with opened(folder, 2 << 20) as store:
        assert store.flush() and store.stats().num_objects == len(object_files(folder))
        assert bytes_in(folder) <= store.stats().num_bytes <= 2 << 20
    for path in object_files(folder)[::2]:
        path.unlink()
    with opened(folder, 2 << 20) as store:
        assert store.flush() and store.stats().num_objects == len(object_files(folder)) > 0
        assert bytes_in(folder) + 16384 >= store.stats().num_bytes


def test_a_failing_write_costs_its_object_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        plain = os.writev

        def fail(file: int, parts: list[memoryview]) -> int:
            plain(file, [parts[0]])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(object_file.os, "writev", fail)
        for number in range(5):
            assert put(store, key_of(number))
        assert store.flush() and not store.contains(key_of(0)) and not get(store, key_of(0))
        monkeypatch.undo()
        assert store.stats().declined == {"disk full": 5} and not store._log.index.reserved
        assert not list((tmp_path / "cache" / "tmp").iterdir()) and store.stats().num_objects == 0
        assert put(store, key_of(0)) and store.flush() and get(store, key_of(0))


def test_a_log_that_cannot_be_written_declines_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        put(store, key_of(0))
        store.flush()
        plain = os.write
        monkeypatch.setattr("outrider.features.tiers.disk.shared_log.os.write",
                            lambda file, data: plain(file, data[:len(data) // 2]))  # a torn write
        put(store, key_of(1))
        store.drop([key_of(0)])
        assert store.flush() and not store.contains(key_of(1)) and not store.contains(key_of(0))
        monkeypatch.undo()
        assert (tmp_path / "cache" / "index.log").stat().st_size % RECORD_BYTES == 0
        put(store, key_of(1))
        assert store.flush() and get(store, key_of(1)) and not store.contains(key_of(0))
        assert store._log.num_rebuilt == 1, "at the start alone: what was written in part was cut"


def test_who_read_records_that_were_cut_reads_the_log_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{WRITER}.LOOK_SECONDS", 1000.0)  # `second` reads when the test says so
    with opened(tmp_path / "cache") as store, opened(tmp_path / "cache") as second:
        assert store.flush() and second.flush()
        plain = os.write

        def torn(file: int, data: bytes) -> int:
            written = plain(file, data[:max(RECORD_BYTES, len(data) // 2)])
            second._log.refresh()
            return written

        with CacheFolder(tmp_path / "cache").locked(1):
            for number in range(8):  # a batch, at most
                put(store, key_of(number))
            monkeypatch.setattr("outrider.features.tiers.disk.shared_log.os.write", torn)
        assert store.flush() and sum(store.stats().declined.values()) > 0 and second._log.index.reserved
        monkeypatch.setattr("outrider.features.tiers.disk.shared_log.os.write", plain)
        for number in range(8, 20):
            put(store, key_of(number))
        assert store.flush() and second.flush() and not second._log.index.reserved
        assert all(get(second, key_of(number)) for number in range(8, 20))
        assert second._log.index.num_bytes == store._log.index.num_bytes


def test_a_failure_of_the_writer_itself_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        monkeypatch.setattr(f"{WRITER}.write_object", lambda *args: 1 // 0)
        put(store, key_of(0))
        assert store.flush() and not store.contains(key_of(0)) and store.stats().declined == {"failure": 1}
        monkeypatch.undo()
        assert put(store, key_of(0)) and store.flush() and get(store, key_of(0))


def test_a_process_that_holds_the_lock_costs_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{WRITER}.LOCK_SECONDS", 0.05)
    with opened(tmp_path / "cache") as store:
        put(store, key_of(0))
        store.flush()
        with CacheFolder(tmp_path / "cache").locked(1):
            put(store, key_of(1))
            assert store.flush() and store.stats().declined == {"folder busy": 1}
            assert get(store, key_of(0)) and not store.contains(key_of(1))
        assert put(store, key_of(1)) and store.flush() and get(store, key_of(1))


def test_the_cache_gives_way_when_the_disk_gets_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache", min_free_bytes=10 << 20) as store:
        for number in range(10):
            put(store, key_of(number), 100_000)
        store.flush()
        monkeypatch.setattr(store._folder, "free_bytes", lambda: (10 << 20) - 300_000)
        put(store, key_of(10), 100_000)
        assert store.flush() and store.stats().evicted == 4 and get(store, key_of(10), 100_000)
        monkeypatch.setattr(store._folder, "free_bytes", lambda: 0)
        put(store, key_of(11), 100_000)
        assert store.flush() and store.stats().declined == {"no room": 1} and get(store, key_of(10), 100_000)


@pytest.fixture
def small_disk(tmp_path: Path) -> object:
    """A disk of 3 MiB, where this user may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", str(place)], capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("no disk may be mounted")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_costs_hits_alone(small_disk: Path) -> None:
    folder = small_disk / "cache"
    with opened(folder, 64 << 20) as store:
        for number in range(200):
            put(store, key_of(number))
            if number == 20:
                (small_disk / "other").write_bytes(os.urandom(1 << 20))  # what is free afterwards others take
            store.flush()
        held = sum(get(store, key_of(number)) for number in range(200))
        assert held > 10 and store.stats().evicted > 0
        free = os.statvfs(small_disk).f_bavail * 4096
        if free:
            (small_disk / "rest").write_bytes(bytes(free))
        store._writer._min_free_bytes = -1 << 30  # what statvfs promised is not there
        for number in range(300, 320):
            put(store, key_of(number))
            store.flush()
        assert store.stats().declined["disk full"] > 0
        assert sum(get(store, key_of(number)) for number in range(200)) == held
    with opened(folder, 64 << 20) as store:
        assert sum(get(store, key_of(number)) for number in range(200)) == held


LIMITED = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from tests.features.disk_cases import get, key_of, length_of, opened, put
with opened(Path(sys.argv[1])) as store:
    for number in range(40):
        assert put(store, key_of(number)) and store.flush()
    for number in range(40):
        assert get(store, key_of(number)) == (length_of(key_of(number)) + 96 <= 40_000), number
    assert store.stats().declined.keys() == {"file too large for the system"}, store.stats()
"""


def test_a_file_that_may_not_grow_costs_its_object(tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE is not None
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "cache")], check=True, timeout=100)
    assert bytes_in(tmp_path / "cache") > 0


def test_random_damage_anywhere_never_gives_wrong_bytes(tmp_path: Path) -> None:
    draw = random.Random(7)
    folder = tmp_path / "cache"
    for _ in range(12):
        with opened(folder, 2 << 20) as store:
            for _ in range(10):
                put(store, key_of(draw.randrange(40)))
            store.flush()
            files = [*object_files(folder), folder / "index.log"]
            for path in draw.sample(files, min(4, len(files))):
                data = bytearray(path.read_bytes())
                for _ in range(draw.randrange(1, 4)):
                    start = draw.randrange(len(data))
                    data[start:start + draw.randrange(60)] = draw.randbytes(draw.randrange(60))
                path.write_bytes(data)
            for number in range(40):
                get(store, key_of(number))
    with opened(folder, 2 << 20) as store:
        assert sum(get(store, key_of(number)) for number in range(40)) > 0
