"""Several processes on one folder, and processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.features.disk_cases import bytes_in, get, key_of, object_files, opened, put
from tests.features.disk_child import NUM_KEYS, SIZE

LARGEST = 52 << 10
ROOT = Path(__file__).parents[2]


def child(folder: Path, seed: int, operations: int, death: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.features.disk_child", str(folder), str(seed), str(operations), str(death)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_folder(folder: Path) -> int:
    """What a start finds is what lies there, whole, and no more than the size. How many objects."""
    with opened(folder, SIZE) as store:
        assert store.flush() and not store._log.index.reserved
        assert not list((folder / "tmp").iterdir()) and len(list((folder / "writers").iterdir())) == 1
        names = {path.name for path in object_files(folder)}
        assert {name[8:].hex() for name in store._log.index.stored} == names
        assert sum(get(store, key_of(number)) for number in range(NUM_KEYS)) == len(names)
        assert bytes_in(folder) <= store.stats().num_bytes <= SIZE + 4096
        return len(names)


@pytest.mark.parametrize("kills", [8, pytest.param(30, marks=pytest.mark.long)])
def test_killed_processes_leave_garbage_that_the_next_start_removes(tmp_path: Path, kills: int) -> None:
    """Processes in a row on one folder. Each is killed at a random change of a file."""
    draw = random.Random(3)
    folder = tmp_path / "cache"
    num_found = num_garbage = 0
    for seed in range(kills):
        process = child(folder, seed, 4000, draw.choice([draw.randrange(1, 30), draw.randrange(30, 400)]))
        _, errors = process.communicate(timeout=100)
        assert process.returncode == -signal.SIGKILL, errors
        if folder.exists() and (folder / "tmp").exists():
            num_garbage += len(list((folder / "tmp").iterdir()))
            assert bytes_in(folder) <= SIZE + LARGEST
        num_found += check_folder(folder)
    assert num_found > 10 * kills and num_garbage > kills // 8, "else the kills came where nothing happens"


def test_processes_killed_from_outside(tmp_path: Path) -> None:
    draw = random.Random(5)
    folder = tmp_path / "cache"
    survivor = child(folder, 99, 3000)
    for seed in range(3):
        process = child(folder, seed, 100_000)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=draw.uniform(0.3, 1.0))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=100)
    _, errors = survivor.communicate(timeout=200)
    assert survivor.returncode == 0, errors
    check_folder(folder)


def test_two_processes_with_random_operations_never_read_wrong_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    processes = [child(folder, seed, 2000) for seed in (1, 2)]
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, bytes_in(folder))
        try:
            processes[0].wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            pass
    counts = []
    for process in processes:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0 and "Traceback" not in errors, errors
        counts.append([int(word) for word in output.split()])
    assert all(found > 100 and stored > 100 for found, stored in counts), counts
    assert 0 < most <= SIZE + 2 * LARGEST, "an object of each process"
    assert check_folder(folder) > 20


def test_processes_see_each_others_objects(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as store:
        other = child(folder, 7, 300)
        _, errors = other.communicate(timeout=100)
        assert other.returncode == 0, errors
        assert store.flush()
        found = [number for number in range(NUM_KEYS) if store.contains(key_of(number))]
        assert len(found) > 30 and all(get(store, key_of(number)) for number in found)
        assert store.stats().stored == 0 and store._log.num_rebuilt == 1


def test_an_object_that_another_process_writes_is_not_written_twice(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store, opened(tmp_path / "cache") as second:
        for number in range(20):
            assert put(store, key_of(number)) and put(second, key_of(number))
        assert store.flush() and second.flush() and store.flush()
        assert store.stats().stored + second.stats().stored == 20
        assert all(get(each, key_of(number)) for each in (store, second) for number in range(20))


def test_an_idle_process_learns_of_new_objects_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.features.tiers.disk.writer.LOOK_SECONDS", 0.01)
    with opened(tmp_path / "cache") as store, opened(tmp_path / "cache") as second:
        put(store, key_of(0))
        store.flush()
        second._writer._thread.join(timeout=0.001)
        for _ in range(3000):
            if second.contains(key_of(0)):
                break
            second._writer._thread.join(timeout=0.01)
        assert get(second, key_of(0))


def test_a_live_writer_is_not_taken_for_a_killed_one(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        half = Path(store._folder.temporary_path(store._writer._number, 1000))
        half.write_bytes(b"being written")
        with opened(tmp_path / "cache") as second:
            assert second.flush() and half.exists()
            assert second._folder.live_writers() == {store._writer._number, second._writer._number}
        assert os.listdir(tmp_path / "cache" / "writers") == [f"{store._writer._number:016x}"]


def test_a_store_knows_whether_others_use_the_folder(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as first:
        assert not first.is_shared and not first.take_found()
        put(first, key_of(1))
        first.flush(60)
        with opened(tmp_path / "cache") as second:
            assert second.is_shared and second.keys() == [key_of(1)] and not second.take_found()
            put(second, key_of(2))
            assert second.flush(60) and first.flush(60)
            assert first.is_shared and first.take_found() == [key_of(2)] and not first.take_found()
            assert not second.take_found(), "what a store has written itself is no news"
            put(first, key_of(3))
            first.flush(60)
            first.drop([key_of(3)])
            assert first.flush(60) and second.flush(60)
            assert not second.take_found(), "what is gone is told as found"
