"""From the command to the first token: `outrider generate FILE --max-tokens 1` beside llama.cpp's own command.

    python bench/start_up.py MODEL.gguf [MODEL.gguf ...] [--llama FOLDER] [--rounds 3]

Prints wall seconds to the first byte of text, wall seconds to the end of the process, and processor seconds of the
whole process, its children included. Three starts: the first on a machine, with an empty cache folder (the kernels are
compiled); the first of a file, with the kernels and nothing else in the folder; and later ones, of which the median
counts. Files are in the system's page cache. llama.cpp (a folder with its `llama-completion` or `llama-cli`) takes
turns with the later starts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROMPT = "The sea is"
TOOLS = ("llama-completion", "llama-cli")
PLACES = (".", "bin", "build/bin")
KERNELS = "native-*"  # the compiled kernels, and what was measured of them
FIRST, FIRST_OF_FILE, LATER, LLAMA = "first start on a machine", "first start of the file", "later starts", "llama.cpp"


class Start(NamedTuple):
    first_s: float  # to the first byte of the answer
    wall_s: float
    processor_s: float

    def __str__(self) -> str:
        return f"first token {self.first_s:6.2f} s   end {self.wall_s:6.2f} s   processor {self.processor_s:6.2f} s"


def start(command: list[str], cache: Path) -> Start:
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                                   env=os.environ | {"OUTRIDER_CACHE": str(cache)})
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{errors.read().decode()[-2000:]}")
    return Start(first, wall, used.ru_utime + used.ru_stime)


def medians(starts: list[Start]) -> Start:
    return Start(*(statistics.median(values) for values in zip(*starts, strict=True)))


def llama_command(folder: str, model: str, threads: int) -> list[str]:
    tool = next((found for name in TOOLS for place in PLACES if (found := Path(folder) / place / name).is_file()), None)
    if tool is None:
        sys.exit(f"{folder} has none of {', '.join(TOOLS)}")
    return [str(tool), "-m", model, "-p", PROMPT, "-n", "1", "-t", str(threads), "-no-cnv", "--no-display-prompt"]


def measure(model: str, llama: str | None, rounds: int, threads: int) -> dict[str, Start]:
    own = [sys.executable, "-m", "outrider", "generate", model, "--prompt", PROMPT, "--max-tokens", "1"]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        found = {FIRST: start(own, cache)}
        for path in cache.iterdir():
            if not path.match(KERNELS):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        found[FIRST_OF_FILE] = start(own, cache)
        starts: dict[str, list[Start]] = {name: [] for name in ((LATER, LLAMA) if llama else (LATER,))}
        for _ in range(rounds):
            starts[LATER].append(start(own, cache))
            if llama:
                starts[LLAMA].append(start(llama_command(llama, model, threads), cache))
    return found | {name: medians(several) for name, several in starts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--llama", metavar="FOLDER", help="where llama.cpp was built")
    parser.add_argument("--rounds", type=int, default=3, help="later starts, and those of llama.cpp (default: 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp (default: all)")
    args = parser.parse_args()
    report = {}
    for model in args.models:
        found = measure(model, args.llama, args.rounds, args.threads)
        report[Path(model).name] = {name: own._asdict() for name, own in found.items()}
        for name, own in found.items():
            print(f"{Path(model).name:<36} {name:<26} {own}", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
