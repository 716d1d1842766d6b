"""`outrider serve` as a process: flags and files, a worker of its own, signals, and a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from outrider.cli import build_parser, main
from outrider.commands.serve import apply_file, server_config
from outrider.commands.serve_files import chat_template, check_template_name
from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder
from tests.server.rig import PATIENCE, chat_tokenizer

FLAGS = ["--device", "cpu", "--dtype", "float32", "--num-pages", "64", "--max-model-len", "96", "--max-num-seqs", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("served") / "tiny-bytes", CONFIGS["llama"])
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def started(folder: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "outrider.cli", "serve", str(folder), "--port", "0", *FLAGS, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ, OUTRIDER_API_KEY="k"))
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"tiny-bytes\b.* at (http://\S+)", line)
    assert found, line + process.stderr.read()
    return process, found[1]


def is_healthy(url: str) -> bool:
    return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200


def wait_healthy(process: subprocess.Popen[str], url: str) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None
        if is_healthy(url):
            return
        time.sleep(0.05)
    raise AssertionError("not healthy in time")


def test_it_serves_replaces_a_worker_that_hangs_and_drains_on_sigterm(folder: Path) -> None:
    process, url = started(folder, "--stall-timeout", "4")
    key = {"Authorization": "Bearer k"}
    try:
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code in (503, 200)  # it listens while it loads
        wait_healthy(process, url)
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=key, timeout=PATIENCE).json()["data"][0]["id"] == "tiny-bytes"
        hang_worker(process, url, key)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "the worker has a process of its own"
        body = {"prompt": "hello", "max_tokens": 80, "ignore_eos": True, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            text = next(lines)
            for own in (process, *children):  # as `timeout` and service managers do: the whole group
                own.send_signal(signal.SIGTERM)
            text += "".join(lines)
        assert '"finish_reason":"length"' in text and text.endswith("data: [DONE]"), "the stream was cut off"
        assert process.wait(PATIENCE) == 0
        assert not psutil.wait_procs(children, timeout=PATIENCE)[1]
    finally:
        process.kill()


def test_it_ends_at_once_when_it_is_told_to_twice(folder: Path) -> None:
    """As an impatient user does, while a request runs."""
    process, url = started(folder)
    key, body = {"Authorization": "Bearer k"}, {"prompt": "hello", "stream": True}
    try:
        wait_healthy(process, url)
        worker = worker_of(process)
        worker.suspend()  # so that the request runs as long as it must
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, headers=key, timeout=PATIENCE) as client:
            asked = pool.submit(client.post, "/v1/completions", json=body)
            while client.get("/load").json() == {"server_load": 0}:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            lines = [process.stderr.readline(), process.stderr.readline()]
            process.send_signal(signal.SIGINT)
            assert asked.result().status_code == 503 and "stopping" in asked.result().text
            worker.resume()
        assert process.wait(PATIENCE) == 0
        assert any("running requests have" in line for line in lines), lines
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()


def test_it_ends_when_it_is_told_to_at_once(folder: Path) -> None:
    """Also before the web server has handlers for signals, and while the model loads."""
    process, _ = started(folder)
    try:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    return next(c for c in psutil.Process(process.pid).children() if "spawn_main" in " ".join(c.cmdline()))


def hang_worker(process: subprocess.Popen[str], url: str, key: dict[str, str]) -> None:
    """Returns when requests are served again."""
    worker = worker_of(process)
    worker.suspend()  # it hangs; the server must find out and end it
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=key, timeout=PATIENCE)
        assert answer.status_code in (200, 503) and "/" not in answer.json().get("error", {}).get("message", "")
        if answer.status_code == 200:
            break
        time.sleep(0.1)
    metrics = httpx.get(f"{url}/metrics", headers=key, timeout=PATIENCE).text
    assert re.search(r"vllm:engine_restarts_total\{.*\} [1-9]\n", metrics)


def test_bad_input_is_one_line_with_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("prot: 8000")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "twice.yaml").write_text("max-num-seqs: 4\nport: 8000\nmax_num_seqs: 8")
    for argv, words in [(["--prot", "1"], "did you mean --port"), (["--port", "70000"], "port must be"),
                        (["--max-num-queued", "1"], "did you mean --max-num-queued-reqs"),
                        (["--config", str(tmp_path / "bad.yaml")], "did you mean port"),
                        (["--config", str(tmp_path / "twice.yaml")], "has the setting 'max_num_seqs' twice"),
                        (["--config", str(tmp_path / "binary.yaml")], "binary.yaml cannot be read: it is not UTF-8"),
                        (["--config", str(tmp_path)], "cannot be read: Is a directory"),
                        (["--chat-template", "{% for"], "the chat template is not valid"),
                        (["--uvicorn-log-level", "loud"], "critical, error"),
                        (["no/such/model", "--port", "0"], "no/such/model")]:
        assert main(["serve", *argv]) == 2, argv
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "words"), [
    (["--max-model-len", "100000"], r"--max-model-len \(100000\) exceeds the 256 positions .*config.json"),
    (["--chat-template", "nope"], "--chat-template 'nope' is neither a file"),
    (["--speculative-config", '{"model": "/nope", "num_speculative_tokens": 2}'], "there is no file or folder /nope"),
    (["--tokenizer", "/nope"], "there is no file or folder /nope"),
    (["--served-model-name", " "], "--served-model-name must be a name"),
    (["--api-key", "key\n"], "--api-key must be ASCII, without spaces or line breaks"),
    (["--allowed-origins", "example.org"], r"--allowed-origins must be \* or an origin such as https://"),
    (["--otlp-traces-endpoint", "collector:4318"], "--otlp-traces-endpoint must be a URL, such as http"),
    (["--host", "a..b"], "cannot listen at a..b"),
])
def test_what_the_files_show_is_said_once_and_before_it_says_that_it_serves(
    folder: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder), "--port", "0", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and re.search(words, lines[0]), lines


def test_what_only_the_worker_finds_is_said_once(tmp_path: Path) -> None:
    path = save_folder(tmp_path / "tiny-bytes", CONFIGS["llama"])
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"surprise": 1}))
    process, _ = started(path)
    assert process.stderr is not None
    left = process.stderr.read()
    assert process.wait() == 2
    assert left.count("surprise=1") == 1 and "Traceback" not in left, left


def test_a_template_that_is_not_there_is_no_prompt(tmp_path: Path) -> None:
    path = str(tmp_path / "chat.jinja")
    with pytest.raises(ValueError, match=r"nor a template, nor one of the model's templates \(default\)"):
        check_template_name(chat_template(path), chat_tokenizer())
    (tmp_path / "chat.jinja").write_text("static")
    with pytest.raises(ValueError, match="is not a Jinja template"):
        chat_template(path)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    for given in (path, "default", "{{ messages }}", None):
        check_template_name(chat_template(given), chat_tokenizer())


def test_a_file_gives_what_the_flags_do_not(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("model: folder\nport: 9000\nmax-num-seqs: 7\napi_key: one\nserved-model-name: [a, b]\n"
                    "speculative-config: {method: ngram, num_speculative_tokens: 2}\n")
    args = build_parser().parse(["serve", "--config", str(path), "--port", "9001"])
    apply_file(args, path)
    config = server_config(args)
    assert (args.model, args.max_num_seqs, config.port) == ("folder", 7, 9001)
    assert config.api_key == ("one",) and config.served_model_name == ("a", "b")
    assert args.speculative_config["method"] == "ngram"
