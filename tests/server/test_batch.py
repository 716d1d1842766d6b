"""`outrider run-batch`: every line of a file is answered, in order, by the route that it names."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.server.batch_file import answer_lines, read_lines
from tests.adapters.folders import write_adapter
from tests.engine.harness import CONFIGS, save_folder
from tests.models.oracle import load
from tests.server.rig import TEMPLATE, chat_tokenizer
from tests.server.test_serve import FLAGS

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("batched") / "tiny-bytes", CONFIGS["llama"])
    chat_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def line(custom_id: str, url: str, body: dict[str, Any], **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


def test_every_line_is_answered_in_order_by_its_route(folder: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line("long", "/v1/completions", {"prompt": "a", "max_tokens": 60, "ignore_eos": True}),
        line("chat", "/v1/chat/completions", {"model": "tiny-bytes", **CHAT}), "",
        line("adapter", "/v1/chat/completions", {"model": "own", **CHAT}),
        line("vector", "/v1/embeddings", {"input": ["a", "b"]}),
        line("score", "/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        line("scored tokens", "/v1/score_tokens", {"prompt": ["ab", "c"]}),
        line("rank", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        line("response", "/v1/responses", {"input": "hi", "max_output_tokens": 4, "temperature": 0}),
        line("other model", "/v1/completions", {"model": "gpt", "prompt": "a"}),
        line("field", "/v1/completions", {"prompt": "a", "max_token": 3}),
        line("streamed", "/v1/chat/completions", CHAT | {"stream": True}),
        line("route", "/v1/chat/completion", CHAT), line("method", "/v1/completions", {"prompt": "a"}, method="GET"),
        json.dumps({"custom_id": "no url", "method": "POST", "body": {}}), "[1]", "{", '{"a": "' + 4000 * "b" + '"}',
        line("last", "/v1/chat/completions", CHAT),
    ]
    given, written = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n".join(lines))
    written.write_text("an earlier answer\n")
    own = write_adapter(tmp_path / "own", load(folder), seed=1)
    assert main(["run-batch", "--model", str(folder), "-i", str(given), "-o", str(written), "--max-body-bytes", "2000",
                 "--enable-lora", "--lora-modules", f"own={own}", *FLAGS]) == 1
    assert "18 lines answered, 9 of them with an error" in capsys.readouterr().err
    answers = [json.loads(each) for each in written.read_text().splitlines()]
    asked = [each for each in lines if each]
    ids = [json.loads(each)["custom_id"] if "custom_id" in each else None for each in asked]
    assert [answer["custom_id"] for answer in answers] == ids
    by_id = {answer["custom_id"]: answer for answer in answers}
    bodies = {name: answer["response"]["body"] for name, answer in by_id.items()}
    assert all((answer["error"] is None) == (answer["response"]["status_code"] == 200) for answer in answers)
    assert bodies["chat"]["choices"] == bodies["last"]["choices"] and bodies["chat"]["usage"]["completion_tokens"] == 4
    assert bodies["response"]["output"][0]["content"][0]["text"] == bodies["chat"]["choices"][0]["message"]["content"]
    assert len(bodies["vector"]["data"]) == len(bodies["score"]["data"]) == len(bodies["rank"]["results"]) == 2
    assert [own["token_ids"] for own in bodies["scored tokens"]["data"]] == [[97, 98], [99]]
    assert bodies["adapter"]["model"] == "own"
    assert bodies["adapter"]["choices"][0]["message"]["content"] != bodies["chat"]["choices"][0]["message"]["content"]
    assert by_id["other model"]["error"]["code"] == 404
    wrong = {name: by_id[name]["error"]["param"] for name in ("field", "streamed", "route", "method", "no url")}
    assert wrong == {"field": "max_token", "streamed": "stream", "route": "url", "method": "method", "no url": "url"}
    assert [answer["response"]["status_code"] for answer in answers[-4:]] == [400, 400, 413, 200]
    assert len({answer["id"] for answer in answers}) == len(answers)


@pytest.mark.parametrize(("flags", "said"), [
    (["-i", "{}/none.jsonl", "-o", "{}/out.jsonl"], "is not a file"),
    (["-i", "{}/in.jsonl", "-o", "{}/in.jsonl"], "is the input file"),
    (["-i", "https://host/in.jsonl", "-o", "{}/out.jsonl"], "only files of this machine"),
    (["-i", "{}/in.jsonl", "-o", "{}/none/out.jsonl"], "out.jsonl"),
    (["-i", "{}/in.jsonl"], "--output-file"),
    (["-i", "{}/in.jsonl", "-o", "{}/out.jsonl", "--lora-modules", "own={}"], "need --enable-lora"),
])
def test_files_are_checked_before_the_model_is_loaded(folder: Path, tmp_path: Path, flags: list[str], said: str,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("in.jsonl", "adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    assert main(["run-batch", str(folder), *(flag.format(tmp_path) for flag in flags)]) == 2
    assert said in capsys.readouterr().err


def test_few_lines_are_in_memory_and_the_first_answer_waits_for_no_later_one() -> None:
    started: list[int] = []
    gates = [asyncio.Event() for _ in range(50)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        number = json.loads((await receive())["body"])["number"]
        started.append(number)
        await gates[number].wait()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"%d" % number})

    async def check() -> None:
        lines = (line(str(i), "/v1/completions", {"number": i}).encode() for i in range(50))
        answers = answer_lines(app, lines, 4)
        for number in (3, 2, 1, 0):  # those that come later end first
            gates[number].set()
        found = [json.loads((await anext(answers)).json)["response"]["body"] for _ in range(4)]
        assert found == [0, 1, 2, 3] and len(started) <= 8
        for gate in gates:
            gate.set()
        assert [json.loads(answer.json)["custom_id"] async for answer in answers] == [str(i) for i in range(4, 50)]
        assert started == list(range(50))

    asyncio.run(check())


def test_a_line_that_is_too_long_is_not_kept() -> None:
    class Counted(io.BytesIO):
        most = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            self.most = max(self.most, size or 0)
            return super().readline(size)

    file = Counted(b"a\n" + 1000 * b"b" + b"\n\n \ncc\n" + 1000 * b"d")
    assert list(read_lines(file, 10)) == [b"a\n", None, b"cc\n", None] and file.most == 11
