"""Trains an EAGLE-3 head within given minutes of a GPU: several engines write answers, then as many epochs as fit.

    python bench/train_in_minutes.py MODEL OUT --answer-minutes 3 --train-minutes 7 [--prompts FILE] [--processes 4]
        [--mps] [-- --draft-vocab-size 16384 ...]

Small models leave a GPU idle while the host prepares steps, so engines beside each other write more than one. Each is
an `outrider train-drafter` with a seed and a share of the prompts of its own, which is ended when its minutes are over;
the answers that it has stored become those of one run. With --mps they share the GPU through NVIDIA's MPS instead of
taking turns: four of them wrote 100,000 tokens a second, and 55,000 to 70,000 without. A short run on the first answers
measures how fast steps are. Flags behind `--` go to the training run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open

from outrider.training.texts import TextStore

SPEED = re.compile(r"step \d+ of \d+: .*?(\d+) tokens/s")
START_SECONDS = 40.0  # of the training run: imports, the target's weights, its states of the texts
CALIBRATION_STEPS = 60
MPS = "nvidia-cuda-mps-control"


def command(args: argparse.Namespace, out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "outrider", "train-drafter", args.model, "--out", str(out), "--shard-texts",
            str(args.shard_texts), "--max-prompt-tokens", str(args.max_prompt_tokens), "--max-answer-tokens",
            str(args.max_answer_tokens), *flags]


@contextmanager
def shared_gpu(work: Path, is_wanted: bool) -> Iterator[dict[str, str]]:
    """The environment of processes that share the GPU, while NVIDIA's daemon for that runs; their usual one if they are
    not to."""
    if not is_wanted:
        yield dict(os.environ)
        return
    folders = {f"CUDA_MPS_{kind}_DIRECTORY": str(work / f"mps-{kind.lower()}") for kind in ("PIPE", "LOG")}
    environment = os.environ | folders
    for folder in folders.values():
        Path(folder).mkdir()
    subprocess.run([MPS, "-d"], env=environment, check=True)
    try:
        yield environment
    finally:
        subprocess.run([MPS], input="quit\n", text=True, env=environment, check=False)


def write_answers(args: argparse.Namespace, work: Path, environment: dict[str, str]) -> list[Path]:
    """Let engines write answers until their minutes are over. Returns the shards that they have stored."""
    lines = [] if args.prompts is None else args.prompts.read_text(encoding="utf-8").splitlines()
    running = []
    for index in range(args.processes):
        flags = ["--seed", str(1000 + index), "--num-texts", "1000000", "--kv-cache-memory-bytes",
                 str(args.cache_bytes)]
        if lines:
            share = work / f"prompts-{index}{args.prompts.suffix}"
            share.write_text("\n".join(lines[index :: args.processes]) + "\n", encoding="utf-8")
            flags += ["--prompts", str(share)]
        with open(work / f"answers-{index}.log", "w", encoding="utf-8") as log:
            running.append(subprocess.Popen(command(args, work / f"answers-{index}", *flags), stdout=log,
                                            stderr=subprocess.STDOUT, start_new_session=True, env=environment))
    end = time.monotonic() + 60 * args.answer_minutes
    while time.monotonic() < end and any(process.poll() is None for process in running):
        time.sleep(0.5)
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shards = [shard for index in range(args.processes)
              for shard in sorted((work / f"answers-{index}" / "training").glob("texts-*.safetensors"))]
    if not shards:
        sys.exit(f"no answers in {args.answer_minutes} minutes: " + (work / "answers-0.log").read_text()[-2000:])
    return shards


def num_tokens(shards: Sequence[Path]) -> int:
    total = 0
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            total += int(file.get_tensor("lengths").sum())
    return total


def train(args: argparse.Namespace, out: Path, shards: Sequence[Path], epochs: int, *, steps: int | None = None) -> int:
    """Train on the texts of these shards. Returns the speed of the last steps, in tokens per second; with `steps` the
    run is ended after about so many."""
    store = TextStore(out / "training")
    (out / "training").mkdir(parents=True)
    for index, shard in enumerate(shards):
        shutil.copy(shard, store.shard_path(index))
    flags = ["--resume", "--num-texts", str(len(shards) * args.shard_texts), "--epochs", str(epochs), *args.flags]
    process = subprocess.Popen(command(args, out, *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    assert process.stdout is not None
    speed = 0
    for line in process.stdout:
        print(line, end="", flush=True)
        if found := SPEED.match(line):
            speed = int(found[1])
            if steps is not None and int(line.split()[1]) >= steps:
                os.killpg(process.pid, signal.SIGKILL)
                break
    if process.wait() and steps is None:
        sys.exit(process.returncode)
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a .gguf file or a name")
    parser.add_argument("out", type=Path, help="the folder of the drafter, a new one; OUT-work keeps the answers")
    parser.add_argument("--prompts", type=Path, help="one a line, as text or (.jsonl) as JSON")
    parser.add_argument("--answer-minutes", type=float, default=3.0, help="default: 3")
    parser.add_argument("--train-minutes", type=float, default=7.0, help="default: 7")
    parser.add_argument("--processes", type=int, default=4, help="engines that write answers (default: 4)")
    parser.add_argument("--mps", action="store_true", help=f"let them share the GPU at the same time ({MPS})")
    parser.add_argument("--cache-bytes", type=int, default=12 << 30, help="of each of them (default: 12 GiB)")
    parser.add_argument("--shard-texts", type=int, default=1536, help="default: 1536")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="default: 1024")
    parser.add_argument("--max-answer-tokens", type=int, default=320, help="default: 320")
    given = sys.argv[1:]
    behind = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:behind])
    args.flags = given[behind + 1 :]
    work = args.out.with_name(args.out.name + "-work")
    if args.out.exists() or work.exists():
        sys.exit(f"{args.out} or {work} is there already: name another folder")
    work.mkdir(parents=True)
    began = time.monotonic()
    with shared_gpu(work, args.mps) as environment:
        shards = write_answers(args, work, environment)
    total = num_tokens(shards)
    print(f"{len(shards)} shards of {total} tokens after {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    speed = train(args, work / "calibration", shards[:1], 1000, steps=CALIBRATION_STEPS)
    left = 60 * args.train_minutes - (time.monotonic() - began) - START_SECONDS
    epochs = max(1, round(speed * left / total))
    print(f"{speed} tokens/s: {epochs} epochs in {left:.0f} s", flush=True)
    train(args, args.out, shards, epochs)


if __name__ == "__main__":
    main()
