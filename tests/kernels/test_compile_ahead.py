"""Kernels are compiled ahead in other processes, and whatever becomes of those, all are compiled in the end.

No card is needed: Triton compiles for one that is not there. What runs with the real compiler, and not the interpreter
of this folder's other tests, runs in a process of its own: this file as a script.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from outrider.kernels.fork_pool import ForkPool
from outrider.kernels.gpu.launch import collected as collected_launch
from outrider.kernels.gpu.launch import precompile
from outrider.kernels.gpu.launch.triton_kernel import OPTIONS, TritonKernel, collecting
from outrider.kernels.gpu.launch.triton_kernel import kernel as launched_kernel

NUM_FORKS = 2
PATIENT = 200.0
NUMBERS = range(3)  # each of the two kernels is compiled for these

# ---- forks, of anything ----


def write(path: Path) -> Callable[[], object]:
    return lambda: path.write_text(str(os.getpid()))


def writes_of(folder: Path, count: int) -> list[Path]:
    return [folder / str(index) for index in range(count)]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def are_gone(processes: Iterable[int]) -> bool:
    """Soon at least: the system ends them one after the other."""
    end = time.monotonic() + PATIENT
    while any(map(is_alive, processes)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_alive, processes))


def raises() -> None:
    raise ValueError


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_in_forks(works: list[Callable[[], object]], num_forks: int, patience: float) -> Iterator[int]:
    """The number of each that is done, until none is for so many seconds."""
    with ForkPool(lambda task: works[int(task)](), num_forks) as forks:
        for number in range(len(works)):
            assert forks.give(str(number).encode()) == number
        while numbers := forks.wait(patience):
            yield from numbers


def test_forks_begin_at_once_and_take_what_comes_later(tmp_path: Path) -> None:
    paths = writes_of(tmp_path, 3)
    works = [*map(write, paths)]
    with ForkPool(lambda task: works[int(task)](), NUM_FORKS) as forks:
        assert forks.wait(PATIENT) == [], "nobody waits for nothing"
        forks.give(b"0")
        end = time.monotonic() + PATIENT
        while not paths[0].exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert forks.wait(PATIENT) == [0]
        forks.give(b"2")
        assert forks.wait(PATIENT) == [1], "tasks are numbered in the order in which they are given"
    processes = {int(paths[at].read_text()) for at in (0, 2)}
    assert os.getpid() not in processes and are_gone(processes) and not paths[1].exists()


def test_what_was_given_is_done_after_the_end(tmp_path: Path) -> None:
    def waits() -> None:
        (tmp_path / "waits").write_text(str(os.getpid()))
        while not (tmp_path / "go").exists():
            time.sleep(0.01)

    path = tmp_path / "quick"
    works = [waits, write(path)]
    with ForkPool(lambda task: works[int(task)](), NUM_FORKS) as forks:
        for number in range(len(works)):
            forks.give(str(number).encode())
        forks.end()
        assert forks.wait(PATIENT) == [1]
        end = time.monotonic() + PATIENT  # the other one may not have begun yet
        while not ((tmp_path / "waits").exists() and (tmp_path / "waits").read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        quick, busy = int(path.read_text()), int((tmp_path / "waits").read_text())
        assert is_alive(busy) and quick != busy
        (tmp_path / "go").touch()
        assert forks.wait(PATIENT) == [0] and forks.wait(PATIENT) == []
    assert are_gone([quick, busy])


def test_forks_take_tasks_of_any_size(tmp_path: Path) -> None:
    sizes = [0, 1, 1 << 20, 3, 1 << 16]
    with ForkPool(lambda task: (tmp_path / str(len(task))).write_bytes(task), NUM_FORKS) as forks:
        for number, size in enumerate(sizes):
            forks.give(bytes([number]) * size)
        while forks.num_done < len(sizes):
            assert forks.wait(PATIENT)
    assert all((tmp_path / str(size)).read_bytes() == bytes([at]) * size for at, size in enumerate(sizes))


def test_forks_share_the_works(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = writes_of(tmp_path, 20)
    works = [*map(write, paths), raises, lambda: print("loud"), lambda: os.write(2, b"loud")]
    assert sorted(run_in_forks(works, NUM_FORKS, PATIENT)) == list(range(23)), "each once, also one that raises"
    processes = {int(path.read_text()) for path in paths}
    assert os.getpid() not in processes and 1 <= len(processes) <= NUM_FORKS
    assert are_gone(processes)
    assert capfd.readouterr() == ("", "")


def test_a_fork_that_dies_takes_one_work_along(tmp_path: Path) -> None:
    paths = writes_of(tmp_path, 20)
    works = [dies, *map(write, paths)]
    with ForkPool(lambda task: works[int(task)](), NUM_FORKS) as forks:
        for number in range(len(works)):
            forks.give(str(number).encode())
        done: list[int] = []
        while len(done) < len(paths):
            done += forks.wait(PATIENT)
    assert sorted(done) == list(range(1, 21)) and all(path.exists() for path in paths)
    start = time.monotonic()
    assert list(run_in_forks([dies] * NUM_FORKS + [write(paths[0])], NUM_FORKS, PATIENT)) == [], "none is left"
    assert time.monotonic() - start < PATIENT, "nobody waits for the dead"


def test_a_fork_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    def hangs() -> None:
        sleeper = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "hangs").write_text(f"{os.getpid()} {sleeper.pid}")
        sleeper.wait()

    start = time.monotonic()
    assert sorted(run_in_forks([hangs, *map(write, writes_of(tmp_path, 3))], NUM_FORKS, 2.0)) == [1, 2, 3]
    assert time.monotonic() - start < PATIENT
    processes = [int(process) for process in (tmp_path / "hangs").read_text().split()]
    assert are_gone(processes)


def test_forks_end_with_their_reader(tmp_path: Path) -> None:
    def hangs() -> None:
        (tmp_path / "written").write_text(str(os.getpid()))
        (tmp_path / "written").rename(tmp_path / "hangs")  # whole from the moment that it is there
        time.sleep(1000)

    waits = lambda: [time.sleep(0.01) for _ in iter((tmp_path / "hangs").exists, True)]  # noqa: E731
    forks = run_in_forks([hangs, waits], 2, PATIENT)
    assert next(forks) == 1
    forks.close()  # type: ignore[attr-defined]
    assert are_gone([int((tmp_path / "hangs").read_text())])


# ---- launches that are collected ----


def in_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_launches_of_one_thread_are_collected() -> None:
    """Another engine of the same process goes on as if nothing were."""
    launched: list[Any] = []
    function = {(1,): lambda *args, **options: launched.append((args, options))}
    kernel, collected = TritonKernel(function), []
    with collecting(lambda *launch: collected.append(launch)):
        kernel[(1,)](5, SIZE=6)
        assert collected == [(function, (5,), {"SIZE": 6} | OPTIONS)] and not launched
        in_another_thread(lambda: kernel[(1,)](7))
        assert len(collected) == 1 and launched == [((7,), OPTIONS)]
    kernel[(1,)](8)
    assert len(collected) == 1 and len(launched) == 2


def test_empty_memory_is_zeros_while_launches_are_collected() -> None:
    def ways(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty(x.shape), torch.empty(*x.shape, dtype=torch.int64), torch.empty_like(x),
                x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int32)]

    def are_zeros() -> bool:
        """Whether new tensors are zeros in memory that tensors of the same sizes have just given back."""
        x = torch.ones(1 << 10)
        del (used := [tensor.fill_(7) for tensor in ways(x)])[:], used
        return not any(bool(tensor.any()) for tensor in ways(x))

    before = torch.empty, torch.empty_like, JITFunction.run
    assert not are_zeros(), "the test can tell"
    with precompile.compiling_ahead(), torch.inference_mode():
        assert are_zeros() and not in_another_thread(are_zeros)
        assert (torch.empty, torch.empty_like, JITFunction.run) == before, "nothing is replaced for everybody"
    assert not are_zeros()


class Pair(NamedTuple):
    first: torch.Tensor
    rest: tuple[Any, ...]


def test_a_launch_goes_to_a_fork_without_its_tensors() -> None:
    big = torch.zeros(1 << 16)
    pair = collected_launch.stand_in(Pair(big, (big, 5, (big,))))
    assert isinstance(pair, Pair) and pair.first == pair.rest[0] == pair.rest[2][0] and pair.rest[1] == 5
    assert pair.first.dtype == big.dtype and pair.first.data_ptr() % 16 == 0
    assert len(pickle.dumps(pair)) < 1000 and pickle.loads(pickle.dumps(pair)) == pair


# ---- kernels, compiled by the script below ----


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each case [process, kernel, number, whether it was on disk] of each time that a kernel was compiled or
    loaded; and under "launchers" the same, without the last, of each time that what launches it was."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "OUTRIDER_COMPILE_THREADS")}
    folder = tmp_path_factory.mktemp("cache")
    environment["TRITON_CACHE_DIR"] = str(folder)
    script = subprocess.run([sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True,
                            timeout=300)
    assert script.returncode == 0, script.stdout + script.stderr
    return json.loads(script.stdout.splitlines()[-1])


def all_of(case: int) -> list[tuple[str, int]]:
    return sorted((kernel, 10 * case + number) for kernel in ("_add", "_times") for number in NUMBERS)


def made_by(entries: list[Any], is_parent: bool, was_on_disk: bool) -> list[tuple[str, int]]:
    return sorted((kernel, number) for in_parent, kernel, number, on_disk in entries
                  if in_parent == is_parent and on_disk == was_on_disk)


def test_forks_compile_and_this_process_loads(compiled: dict[str, Any]) -> None:
    entries = compiled["forked"]
    assert made_by(entries, is_parent=False, was_on_disk=False) == all_of(1)
    assert made_by(entries, is_parent=True, was_on_disk=True) == all_of(1)
    assert len(entries) == 2 * len(all_of(1)), "each of them once"


def test_collecting_imports_no_compiler_of_torch(compiled: dict[str, Any]) -> None:
    """It takes seconds, and some modes make torch import it."""
    assert compiled["forked"] and not compiled["has dynamo"]


def test_forks_prepare_launches_too(compiled: dict[str, Any]) -> None:
    """Triton 3.6 compiles a launcher for every kernel: it would do so one by one, when they are launched."""
    made = sorted((kernel, number) for in_parent, kernel, number in compiled["launchers"] if not in_parent)
    assert made == all_of(1)


def test_compiled_kernels_are_found_by_launches(compiled: dict[str, Any]) -> None:
    assert compiled["launched"] == [], "nothing is compiled or loaded again, where a launch reaches the card"


def test_what_is_on_disk_is_loaded_without_forks(compiled: dict[str, Any]) -> None:
    assert made_by(compiled["again"], is_parent=True, was_on_disk=True) == all_of(1)
    assert len(compiled["again"]) == len(all_of(1))


@pytest.mark.parametrize(("name", "case"), [("dies", 2), ("hangs", 3)])
def test_what_a_fork_leaves_undone_is_done_here(compiled: dict[str, Any], name: str, case: int) -> None:
    here = made_by(compiled[name], is_parent=True, was_on_disk=False)
    assert ("_add", 10 * case) in here
    assert sorted(here + made_by(compiled[name], is_parent=True, was_on_disk=True)) == all_of(case)


def test_a_refused_kernel_is_refused_when_it_is_launched(compiled: dict[str, Any]) -> None:
    rest = [made for made in all_of(4) if made != ("_add", REFUSED)]
    assert made_by(compiled["refused"], is_parent=True, was_on_disk=True) == rest
    assert compiled["error"] == "CompileTimeAssertionFailure"


@pytest.mark.parametrize(("name", "case"), [("one core", 5), ("one worker", 6), ("always compile", 7)])
def test_it_compiles_here_if_it_must(compiled: dict[str, Any], name: str, case: int) -> None:
    here = made_by(compiled[name], is_parent=True, was_on_disk=False)
    assert sorted(set(here)) == all_of(case) and len(here) == len(compiled[name])


def test_kernels_are_begun_before_all_are_known(compiled: dict[str, Any]) -> None:
    begun = made_by(compiled["begun"], is_parent=False, was_on_disk=False)
    assert begun == [made for made in all_of(8) if made[1] < 82] and len(begun) >= precompile.MIN_KERNELS
    entries = compiled["all"]
    assert made_by(entries, is_parent=False, was_on_disk=False) == all_of(8), "each of them once"
    assert made_by(entries, is_parent=True, was_on_disk=True) == all_of(8)


def test_a_fork_names_a_kernel_as_this_process_does(compiled: dict[str, Any]) -> None:
    """Triton's name of a kernel depends on which functions it has met before."""
    here, in_fork, alone = compiled["keys"]
    assert here == in_fork != alone


def test_a_launch_waits_for_its_kernel_alone(compiled: dict[str, Any]) -> None:
    """A fork hangs with a kernel of one function, for another number."""
    assert compiled["waited"] == ["Launched", "Launched"]
    assert {("_add", 91), ("_times", 91)} <= set(made_by(compiled["own"], is_parent=True, was_on_disk=True))
    assert not made_by(compiled["own"], is_parent=True, was_on_disk=False), "what a fork compiles is not compiled here"


def test_nothing_waits_for_what_is_postponed(compiled: dict[str, Any]) -> None:
    """The kernels of one number are postponed, and a fork holds one of them back."""
    early = [made for made in all_of(10) if made[1] != HELD]
    assert compiled["postponed"]["states"] == [[False, True], [False, False]]
    before, after = compiled["postponed"]["before"], compiled["postponed"]["after"]
    assert set(early) <= set(made_by(before, is_parent=True, was_on_disk=True))
    assert ("_add", HELD) not in made_by(before, is_parent=True, was_on_disk=True)
    assert made_by(after, is_parent=True, was_on_disk=True) == all_of(10)
    assert made_by(after, is_parent=False, was_on_disk=False) == all_of(10), "each of them once"


# ---- the script ----

REFUSED, DEADLY, HANGING, SLOW, HELD = 40, 20, 30, 90, 102


NOTHING = tl.constexpr(0)


@triton.jit
def _same(x):
    """Called by both kernels: to Triton they are other kernels if it has met this function before."""
    return x + NOTHING


@launched_kernel
def _add(x, out, size, NUMBER: tl.constexpr):
    tl.static_assert(NUMBER != 40)
    tl.store(out + size, _same(tl.load(x)) + NUMBER)


@launched_kernel
def _times(x, out, size, NUMBER: tl.constexpr):
    tl.store(out + size, _same(tl.load(x)) * NUMBER)


class Launched(Exception):
    pass


class Card:
    """An H200 that is not there, and that must not be asked for in a fork."""

    def __init__(self, launchers: Path) -> None:
        self.process, self.launchers = os.getpid(), launchers

    def _answer(self, value: Any) -> Any:
        assert os.getpid() == self.process, "a fork asked the device"
        return value

    def get_current_device(self) -> int:
        return self._answer(3)

    def get_current_stream(self, device: int) -> int:
        return self._answer(0)

    def get_current_target(self) -> GPUTarget:
        return self._answer(GPUTarget("cuda", 90, 32))

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        with self.launchers.open("a") as log:
            made = [os.getpid() == self.process, source.name, next(iter(source.constants.values()))]
            log.write(json.dumps(made) + "\n")
        raise Launched


class Script:
    def __init__(self, folder: Path) -> None:
        self.log, self.process = folder / "log", os.getpid()
        self.x = torch.zeros(64)
        self.launchers, self.go = folder / "launchers", folder / "go"
        driver.set_active(Card(self.launchers))  # type: ignore[arg-type]
        knobs.compilation.listener = self.note
        for kernel in (_add, _times):
            kernel.function.add_pre_run_hook(partial(self.break_fork, kernel))

    def note(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        number = next(iter(src.constants.values()))
        with self.log.open("a") as log:
            log.write(json.dumps([os.getpid() == self.process, src.name, number, cache_hit]) + "\n")

    def break_fork(self, kernel: TritonKernel, *_: Any, NUMBER: int, **__: Any) -> None:
        if os.getpid() != self.process:
            if NUMBER == DEADLY:
                dies()
            if NUMBER == HANGING or (NUMBER == SLOW and kernel is _times):
                time.sleep(1000)
            while NUMBER == HELD and kernel is _add and not self.go.exists():
                time.sleep(0.01)

    def launch(self, case: int) -> Iterator[Callable[[], Any]]:
        """Twice each, for sizes that make no difference to the compiler."""
        for number, kernel, size in product(NUMBERS, (_add, _times), (5, 7)):
            yield lambda kernel=kernel, number=number, size=size: kernel[(1,)](  # type: ignore[misc]
                self.x, torch.empty(64), size, NUMBER=10 * case + number)

    def compile(self, case: int, **options: Any) -> list[Any]:
        self.log.write_text("")
        with precompile.compiling_ahead(**options):
            for launch in self.launch(case):
                launch()
        precompile.finish_compiling()
        assert isinstance(driver.active, Card)
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def run(self) -> dict[str, Any]:
        made: dict[str, Any] = {"forked": self.compile(1, workers=NUM_FORKS)}
        made["has dynamo"] = "torch._dynamo" in sys.modules
        made["launchers"] = [json.loads(line) for line in self.launchers.read_text().splitlines()]
        made["launched"] = self.find_compiled(1)
        for kernel in (_add, _times):
            kernel.function.device_caches.clear()
        made["again"] = self.compile(1, workers=NUM_FORKS)
        made["dies"] = self.compile(2, workers=NUM_FORKS)
        precompile.PATIENCE = 1.0
        made["hangs"] = self.compile(3, workers=NUM_FORKS)
        precompile.PATIENCE = PATIENT
        made["begun"], made["all"] = self.begin_early(8)
        made["waited"], made["own"] = self.wait_for_one(9)
        made["postponed"] = self.postpone(10)
        made["keys"] = self.keys_in_a_fork()
        made["refused"] = self.compile(4, workers=NUM_FORKS)
        made["error"] = self.refusal()
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        made["one core"] = self.compile(5)
        os.sched_setaffinity(0, cores)
        os.environ["OUTRIDER_COMPILE_THREADS"] = "1"
        importlib.reload(precompile)
        made["one worker"] = self.compile(6)
        knobs.compilation.always_compile = True
        made["always compile"] = self.compile(7, workers=NUM_FORKS)
        return made

    def begin_early(self, case: int) -> tuple[list[Any], list[Any]]:
        """Returns the kernels that were compiled before the last launches, and all of them."""
        self.log.write_text("")
        *first, last = [list(group) for _, group in groupby(enumerate(self.launch(case)), lambda pair: pair[0] // 4)]
        with precompile.compiling_ahead(workers=NUM_FORKS):
            begun: list[str] = []
            end = time.monotonic() + PATIENT
            while len(begun) < 4 and time.monotonic() < end:
                for _, launch in chain(*first):
                    launch()
                time.sleep(0.02)
                begun = self.log.read_text().splitlines()
            for _, launch in last:
                launch()
        precompile.finish_compiling()
        return [json.loads(line) for line in begun], [json.loads(line) for line in self.log.read_text().splitlines()]

    def wait_for_one(self, case: int) -> tuple[list[str], list[Any]]:
        """How launches end whose kernels forks compile, while one of them hangs, and what this process did for them."""
        with precompile.compiling_ahead(workers=NUM_FORKS):
            for launch in self.launch(case):
                launch()
        self.log.write_text("")
        ended = []
        for kernel in (_add, _times):
            with pytest.raises(Exception) as error:
                kernel[(1,)](self.x, torch.empty(64), 5, NUMBER=10 * case + 1)
            ended.append(type(error.value).__name__)
        own = [json.loads(line) for line in self.log.read_text().splitlines()]
        assert precompile.is_compiling(), "the hanging fork"
        precompile.PATIENCE = 1.0
        precompile.finish_compiling()
        assert not precompile.is_compiling()
        precompile.PATIENCE = PATIENT
        return ended, own

    def postpone(self, case: int) -> dict[str, Any]:
        """What is made, and whether kernels of both sorts are on their way, before and after a fork is let go."""
        self.log.write_text("")
        states, made = [], []
        with precompile.compiling_ahead(workers=NUM_FORKS):
            launches = list(self.launch(case))
            with precompile.postponing():
                for launch in launches[8:]:  # the last number
                    launch()
            for launch in launches:
                launch()
        for _ in range(2):
            precompile.finish_compiling(postponed=False)
            end = time.monotonic() + PATIENT
            while self.go.exists() and precompile.has_postponed() and time.monotonic() < end:
                time.sleep(0.01)
            states.append((precompile.is_compiling(), precompile.has_postponed()))
            made.append([json.loads(line) for line in self.log.read_text().splitlines()])
            self.go.touch()
        return {"states": states, "before": made[0], "after": made[1]}

    def keys_in_a_fork(self) -> list[str]:
        """Returns a kernel's key here, in a fork that got it with its task, and as that fork would make it itself."""
        stand_in, functions = collected_launch.stand_in(self.x), (_times.function, _same)
        task = collected_launch.CollectedLaunch(_times.function, (stand_in, stand_in, 5), {"NUMBER": 1}).pickled()
        found = []
        for run in (lambda: None, lambda: collected_launch.compile_pickled(task), lambda: None):
            run()
            found.append(_times.function.cache_key)
            for function in functions:
                function.hash, function.used_global_vals = None, {}
        return found

    def find_compiled(self, case: int) -> list[Any]:
        """What launches compile or load."""
        self.log.write_text("")
        for launch in self.launch(case):
            with pytest.raises(Launched):
                launch()
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def refusal(self) -> str:
        with pytest.raises(Exception) as refused:
            _add[(1,)](self.x, self.x, 5, NUMBER=REFUSED)
        return type(refused.value).__name__


if __name__ == "__main__":
    print(json.dumps(Script(Path(sys.argv[1])).run()))
