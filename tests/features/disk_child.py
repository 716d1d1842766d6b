"""A process that uses a disk cache at random: `python -m tests.features.disk_child FOLDER SEED OPERATIONS DEATH`.

DEATH 0: run to the end and print counts. Otherwise the process kills itself at its DEATH-th change of the folder,
before, after or in the middle of that call of the system.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from outrider.features.tiers.disk import DiskStore
from tests.features.disk_cases import get, key_of, opened, put

SIZE = 2 << 20
NUM_KEYS = 160


def die_at(death: int) -> None:
    """Count calls that change files, and be killed at one of them."""
    numbers = itertools.count(1)

    def wrapped(plain: Any, is_write: bool) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            number = next(numbers)
            if number == death and number % 3 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == death and number % 3 == 1 and is_write:  # in the middle
                part = args[1] if isinstance(args[1], bytes) else bytes(args[1][0])
                plain_write(args[0], part[:len(part) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return plain(*args, **more)
            finally:
                if number == death:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    plain_write = os.write
    for name in ("rename", "unlink", "writev", "write"):
        setattr(os, name, wrapped(getattr(os, name), name.startswith("write")))


def use(store: DiskStore, draw: random.Random, operations: int) -> tuple[int, int]:
    num_found = num_stored = 0
    for _ in range(operations):
        key = key_of(draw.randrange(NUM_KEYS))
        match draw.randrange(20):
            case 0:
                store.flush()
            case 1:
                store.drop([key])
            case 2:
                store.pin([key], draw.choice([0.0, 1e12]))
            case 3 | 4:
                store.touch(key)
            case number if number < 12:
                num_found += get(store, key)
            case number:
                num_stored += put(store, key, boundary=number % 2 == 0)
    return num_found, num_stored


def main() -> None:
    folder, seed, operations, death = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    if death:
        die_at(death)
    with opened(folder, SIZE) as store:
        found, stored = use(store, random.Random(seed), operations)
        store.flush()
    print(found, stored)


if __name__ == "__main__":
    main()
