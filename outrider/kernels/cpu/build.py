"""Compiles the native CPU kernels once with the machine's C compiler, keeps the library in the user's cache folder, and
loads it.

This file has the signatures of the library's functions."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.core.host_cores import num_cores
from outrider.core.status_line import status_line
from outrider.kernels.cpu.structures import STRUCTURES, layout_source

HERE = Path(__file__).parent
SOURCES = tuple(
    HERE / name
    for name in ("packed.c", "product.c", "adapters.c", "attention.c", "native.c", "draft_chain.c", "sampling.c",
                 "packed_blocks.c", "step.c", "draft_plan.c", "sampling_draw.c", "sampling_edits.c",
                 "sampling_filters.c", "sampling_logprobs.c")
)  # those that take longest first
HEADERS = tuple(HERE / name for name in ("native.h", "packed.h", "sampling.h", "panel_neon.h"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")
INSTRUCTION_SETS = ("asimd", "asimddp", "asimdhp", "avx2", "avx512_vnni", "avx512f", "f16c", "fma", "i8mm", "sve")
BUILD_SECONDS = 600  # a compiler that hangs must not hang the engine; 10 s of work took over 120 s on a busy machine

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "rms_norm": (None, [_P, _L, _P, _L, _P, _P, _L, _L, _F, _I]),
    "elements": (None, [_P, _L, _P, _L, _L, _P, _L, _L, _F, _I, _I]),
    "gated": (None, [_P, _L, _P, _L, _L, _I, _I]),
    "sample_rows": (_I, [_P, _P, _P, _I]),
    "count_runs": (_I, [_P, _P, _P, _L, _L, _P, _L, _L]),
    "rope_write": (_L, [_P, _L, _L, _P, _I]),
    "product": (None, [_P, _P, _L, _P, _L, _I]),
    "packed_lanes": (_L, []),
    "packed_unit_bytes": (_L, [_L]),
    "pack_rows": (None, [_P, _P, _L, _I]),
    "pack_blocks": (None, [_P, _L, _L, _L, _L, _P]),
    "unpack_rows": (None, [_P, _L, _P, _L, _P, _I]),
    "coarsen_rows": (None, [_P, _L, _P, _I]),
    "take_packed_rows": (None, [_P, _L, _P, _L, _P, _I]),
    "paged_attention": (_I, [_P, _I]),
    "prepare_step": (_I, [_P, _P, _P, _P, _P]),
    "commit_step": (_I, [_P, _P, _P]),
    "store_drafts": (_I, [_P, _P]),
    "plan_draft_passes": (_I, [_P, _P, _P]),
    "forget_pages": (_I, [_P, _P]),
    "propose_chain": (_L, [_P, _P, _P, _P, _I]),
    "find_ngram": (None, [_P, _L, _P, _P, _L, _L, _L, _L, _L, _P, _P]),
    "sort_slots": (None, [_P, _L, _L, _P, _P, _P, _P]),
    "reduce_adapters": (None, [_P, _P, _P, _L, _L, _P, _I]),
    "add_adapters": (None, [_P, _P, _P, _P, _L, _L, _L, _I]),
    "decoder_layers": (_L, [_P, _L, _P, _P, _P, _P, _I, _P, _P, _I]),
}


log = logging.getLogger("outrider")


class BuildError(RuntimeError):
    """The native library cannot be built or loaded. `outrider env` shows the message."""


class UnwritableFolder(BuildError):
    """The folder holds no library yet, and none can be written to it."""


def cache_folder() -> Path:
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def build(folder: Path | None = None) -> Path:
    """Return the library's path in a folder, by default the cache folder. Compiles only if the folder has no library
    for these sources, this compiler and this processor. The file name ends with a hash of the file's bytes, because a
    full disk or a power failure can leave a truncated file, and a process that loads one crashes."""
    folder = cache_folder() if folder is None else folder
    compiler = _compiler()
    try:
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=True
        ).stdout
        code = [*(file.read_text() for file in (*HEADERS, *SOURCES)), layout_source()]
        identity = "\n".join([*code, version, *compiler, *FLAGS, _processor()])
        name = f"native-{_hash(identity.encode())}"
        kept = next((file for file in sorted(folder.glob(f"{name}-*.so")) if _is_whole(file)), None)
        return kept or _compile(compiler, folder, name)
    except subprocess.TimeoutExpired as error:  # whose own text is the whole command
        raise BuildError(f"{shlex.join(compiler)} took over {BUILD_SECONDS} s; the next start tries again") from error
    except subprocess.CalledProcessError as error:  # whose own text has not what the compiler said
        said = f": {error.stderr.strip()[-500:]}" if error.stderr.strip() else ""
        raise BuildError(f"{shlex.join(compiler)} --version ended with status {error.returncode}{said}") from error
    except OSError as error:
        raise BuildError(f"{shlex.join(compiler)}: {error}") from error


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    return library.stem.endswith(_hash(library.read_bytes()))


def describe() -> str:
    """Return lines for `outrider env`: the compiler and the instruction sets, or why there are no native kernels."""
    if not available():
        return f"none: {reason()}"
    sets = sorted(set(_processor().split()) & set(INSTRUCTION_SETS))
    return f"built by {shlex.join(_compiler())} for {platform.machine()}" + (f" with {', '.join(sets)}" if sets else "")


def _compiler() -> list[str]:
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C compiler was found: install cc, gcc or clang")


def _processor() -> str:
    """Return a text that identifies the processor: -march=native depends on it, and machines may share a cache
    folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(fields)})])


def _compile(compiler: list[str], folder: Path, name: str) -> Path:
    """Compile to a temporary file and rename it, so that other processes see the whole file or none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, output = tempfile.mkstemp(suffix=".so", dir=folder)
    except OSError as error:
        raise UnwritableFolder(f"{folder} cannot be written ({error.strerror})") from error
    os.close(handle)
    try:
        with status_line("building the CPU kernels, once, in about 10 s", is_once=True):
            _run_compiler(compiler, output)
        target = folder / f"{name}-{_hash(Path(output).read_bytes())}.so"
        os.replace(output, target)
        return target
    finally:
        Path(output).unlink(missing_ok=True)


def _run_compiler(compiler: list[str], output: str) -> None:
    """Compile every source in a process of its own, at the same time, and link the results. The time limit holds for
    all compilers together, so one that starts late gets no time beyond it."""
    compile_one = functools.partial(_compile_one, deadline=time.monotonic() + BUILD_SECONDS)
    for flags in (FLAGS, [flag for flag in FLAGS if flag != "-fopenmp"]):  # one thread is better than none
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder, ThreadPoolExecutor(num_cores()) as pool:
            objects = [f"{folder}/{index}.o" for index in range(len(SOURCES) + 1)]
            named = [*([str(source)] for source in SOURCES), ["-x", "c", "-"]]  # the layout comes by standard input
            commands = [[*compiler, *flags, f"-I{HERE}", "-c", *source, "-o", made]
                        for source, made in zip(named, objects, strict=True)]
            failed = next((done for done in pool.map(compile_one, commands) if done.returncode), None)
            done = failed or compile_one([*compiler, *flags, "-shared", *objects, "-o", output, "-lm"])
        if done.returncode == 0:
            return
    said = done.stderr.strip()[-500:] or f"it said nothing and ended with status {done.returncode}"
    raise BuildError(f"{shlex.join(compiler)} failed: {said}")


def _compile_one(command: list[str], deadline: float) -> subprocess.CompletedProcess[str]:
    seconds_left = max(deadline - time.monotonic(), 0)
    return subprocess.run(command, input=layout_source(), capture_output=True, text=True, timeout=seconds_left)


def is_switched_off() -> bool:
    return os.environ.get("OUTRIDER_NATIVE") == "0"


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Load the library. Returns the library, or None with the reason. Raises an error if Python and C disagree about
    the layout of a struct."""
    if is_switched_off():
        return None, "switched off by OUTRIDER_NATIVE=0"
    try:
        lib = _open_library()
    except (BuildError, OSError) as error:
        return None, str(error)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    for structure in STRUCTURES:
        structure.check(lib)
    return lib, ""


def _open_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(build()))
    except UnwritableFolder as error:  # a home that is read-only, as containers have
        log.warning("the CPU kernels are built at every start, because %s: set OUTRIDER_CACHE to a folder that can be",
                    error)
        with tempfile.TemporaryDirectory(prefix="outrider-") as spare:  # a library that is loaded needs no file
            return ctypes.CDLL(str(build(Path(spare))))


def available() -> bool:
    return load()[0] is not None


def reason() -> str:
    """Return why the native kernels are not available; empty if they are."""
    return load()[1]


def library() -> ctypes.CDLL:
    """Return the library. Call this only if `available()`."""
    found = load()[0]
    assert found is not None
    return found
