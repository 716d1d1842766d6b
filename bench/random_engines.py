"""Searches for wrong tokens: random engines of every family with every drafter, held against transformers.

    python bench/random_engines.py --seconds 480 --processes 14 --seed 1 --out engines.jsonl
    python bench/random_engines.py --only 100017

A seed draws a whole engine: a tiny model of a family, a drafter, settings and requests (`bench/random_cases.py` says
what counts as wrong). Consecutive seeds go through all pairs of family and drafter. Engines run on the CPU, one thread
each, in processes that are started anew for every few seeds: a crash or an engine that hangs ends one seed. `--out`
gets a JSON line for each engine. The last table counts them; the exit status is 1 if any token was wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SEEDS_APART = 100_000  # between the first seeds of two campaigns
BATCH = 24  # seeds of one process
LIMIT = 150.0  # seconds that one engine may take
# Before torch is imported.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "OUTRIDER_CHECK": "1",
}


def run_seeds(seeds: Sequence[int], seconds: float, limit: float) -> None:
    """The process of a few seeds. Prints each seed when it begins, and its line of results when it ends."""
    import logging

    import torch

    from bench.random_cases import run_case

    end = time.monotonic() + seconds
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for seed in seeds:
        if time.monotonic() > end:
            return
        print(json.dumps({"begins": seed}), flush=True)
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
                line = run_case(seed, Path(folder))
        except Exception:
            line = line_of(seed) | {"failure": traceback.format_exc()[-3000:]}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(line, default=str), flush=True)


def line_of(seed: int) -> dict[str, Any]:
    """The beginning of a seed's line of results."""
    from bench.random_targets import PAIRS

    family, method = PAIRS[seed % len(PAIRS)]
    return {"seed": seed, "family": family, "drafter": method}


class Campaign:
    """Processes that go through seeds until the time is over."""

    def __init__(self, first: int, count: int, seconds: float, limit: float, out: TextIO) -> None:
        self._seeds = iter(range(first, first + count))
        self._end, self._limit, self._out = time.monotonic() + seconds, limit, out
        self._lock = threading.Lock()
        self.lines: list[dict[str, Any]] = []

    def run(self, processes: int) -> None:
        threads = [threading.Thread(target=self._serve) for _ in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        seeds: list[int] = []
        while time.monotonic() < self._end:
            with self._lock:
                seeds = seeds or list(itertools.islice(self._seeds, BATCH))
            if not seeds:
                return
            seeds = self._run_process(seeds)

    def _run_process(self, seeds: list[int]) -> list[int]:
        """Run one process. Returns the seeds that are left if it crashed."""
        command = [sys.executable, __file__, "--limit", str(self._limit), "--seconds",
                   str(self._end - time.monotonic()), "--seeds", *map(str, seeds)]
        begun, left = None, list(seeds)
        with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | ENVIRONMENT) as process:
            assert process.stdout is not None
            for text in process.stdout:
                if not text.startswith("{"):
                    continue
                line = json.loads(text)
                begun = line.get("begins")
                if begun is None:
                    left.remove(line["seed"])
                    self._add(line)
            status = process.wait()
            if status == 0:
                return []
            errors.seek(0)
            seed = left[0] if begun is None else begun
            self._add(line_of(seed) | {"failure": f"its process ended with status {status}: {errors.read()[-3000:]}"})
        return [other for other in left if other != seed]

    def _add(self, line: dict[str, Any]) -> None:
        with self._lock:
            self.lines.append(line)
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()
        if "failure" in line:
            pair = f"{line.get('family')} with {line.get('drafter')}"
            print(f"seed {line['seed']}, {pair}: {line['failure']}", flush=True)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The counts of a campaign."""
    from bench.random_targets import PAIRS

    sums: Counter[str] = Counter()
    for line in lines:
        sums.update({key: value for key, value in line.items() if isinstance(value, int) and key != "seed"})
    served = [line for line in lines if "refused" not in line]
    pairs = Counter((line.get("family"), line.get("drafter")) for line in served if "family" in line)
    rows = {
        "engines": len(served), "refused at start-up": len(lines) - len(served),
        f"pairs of family and drafter (of {len(PAIRS)})": len(pairs), "pairs met twice or more": sum(
            count > 1 for count in pairs.values()),
        "tokens compared": sums["tokens"], "tokens held against transformers": sums["against_transformers"],
        "drafts": sums["drafts"], "drafts accepted": sums["accepted"], "tokens from prefix hits": sums["hits"],
        "preemptions": sums["preemptions"], "aborted requests": sums["aborted"],
        "near-ties of arithmetic": sums["near_ties"], "failures": sum("failure" in line for line in lines),
    }
    return "\n".join(f"{name:<45} {count:>9}" for name, count in rows.items())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="begin no engine later")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="another number draws other engines")
    parser.add_argument("--engines", type=int, default=SEEDS_APART, help="stop after so many")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that one engine may take")
    parser.add_argument("--out", type=Path, default=Path("random_engines.jsonl"))
    parser.add_argument("--only", type=int, nargs="+", help="run these seeds here and print their results")
    parser.add_argument("--seeds", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.seeds or args.only:
        run_seeds(args.seeds or args.only, args.seconds if args.seeds else LIMIT * len(args.only), args.limit)
        return 0
    with args.out.open("w") as out:
        campaign = Campaign(SEEDS_APART * args.seed, args.engines, args.seconds, args.limit, out)
        campaign.run(args.processes)
    print(table(campaign.lines))
    return int(any("failure" in line for line in campaign.lines))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    sys.exit(main(sys.argv[1:]))
