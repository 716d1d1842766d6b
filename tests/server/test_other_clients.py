"""lm-eval against the served SmolLM2, in an environment of its own.

It pins other versions of packages that the tests use, and is fetched when the test runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.long
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS = [("The capital of France is", [" Paris", " banana", " seven"], 0),
             ("Two plus two is", [" purple", " four", " Paris"], 1),
             ("The sun rises in the", [" fridge", " east", " carpet"], 1),
             ("Water freezes into", [" music", " ice", " Tuesday"], 1)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "outrider.cli", "serve", "smollm2", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = re.search(r" at (http://\S+)", process.stderr.readline())
        assert found is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        waiter = threading.Event()
        while httpx.get(f"{found[1]}/health").status_code != 200:
            assert process.poll() is None
            waiter.wait(0.2)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def environment(path: Path, *packages: str) -> Path:
    venv.create(path, with_pip=True)
    done = subprocess.run([path / "bin/pip", "install", "-q", *packages], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(packages)} cannot be fetched: {done.stderr[-200:]}")
    return path / "bin"


def test_lm_eval_scores_texts(url: str, tmp_path: Path) -> None:
    """Log-likelihoods of given answers, which are echoed prompts; the right ones are likelier."""
    programs = environment(tmp_path / "lm_eval", "lm-eval[api]")
    lines = [json.dumps({"question": text, "choices": answers, "answer": right}) for text, answers, right in QUESTIONS]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "tiny_choice.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.jsonl")))
    arguments = f"model=smollm2,base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
    done = subprocess.run([programs / "lm_eval", "run", "--model", "local-completions", "--tasks", "tiny_choice",
                           "--include_path", tmp_path, "--model_args", arguments], capture_output=True, text=True,
                          timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    found = re.search(r"\|acc\s*\|[^|]*\|\s*([\d.]+)\|", done.stdout)
    assert found is not None and float(found[1]) >= 0.75, done.stdout + done.stderr[-2000:]
