"""`outrider chat` on a pseudo-terminal: history, pastes, interrupts, unicode and unknown commands; and `generate` in a
pipe, which keeps what is finished. What was sent shows in the length of the prompt: the model's tokens are bytes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM
from outrider.commands import chat as chat_command
from outrider.commands.chat import PromptProgress
from outrider.commands.word_wrap import WordWrap, wrapped
from outrider.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from outrider.engine.stats import EngineStats
from outrider.kernels.cpu import build
from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot: "
FRAME = len("user: \nbot: ")
SECONDS = 300.0  # other test processes share the machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_folder(path, CONFIGS["llama"] | {"vocab_size": 260, "eos_token_id": 257, "max_position_embeddings": 16384})
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


class Terminal:
    """A chat at the other end of a pseudo-terminal."""

    def __init__(self, folder: Path, cache: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "outrider.cli", "chat", str(folder), "--temperature", "0", "--ignore-eos",
                   "--max-num-seqs", "2", *flags]
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and so would the chat
            os.execve(sys.executable, command, os.environ | {"OUTRIDER_CACHE": str(cache), "TERM": "xterm"})
        self.seen = ""
        self.status: int | None = None

    def send(self, text: str) -> None:
        data = text.encode()
        while data:  # the other end reads while it is written to
            data = data[os.write(self._fd, data[:512]) :]
            self._read(0.0)

    def expect(self, pattern: str) -> re.Match[str]:
        """What comes next and matches; what was before it is forgotten."""
        deadline = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen[-2000:]!r}"
            self._read(0.1)
        self.seen = self.seen[found.end() :]
        return found

    def interrupt_prompt(self) -> None:
        """Readline notes a signal that comes before it waits for keys only with the next key, so one follows."""
        time.sleep(0.2)
        self.send("\x03")
        for _ in range(20):
            self._read(0.1)
            has_ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if self.seen.replace("^C", "").strip() or has_ended:
                return
        self.send("x")

    def ask(self, text: str) -> int:
        """The tokens of the prompt that was made of a text."""
        self.send(text)
        length = int(self.expect(r"prompt (\d+) tokens")[1])
        self.expect("> ")
        return length

    def end(self) -> int:
        if self.status is None:
            deadline = time.monotonic() + SECONDS
            while not (done := os.waitpid(self._pid, os.WNOHANG))[0]:
                assert time.monotonic() < deadline, "the chat does not end"
                self._read(0.1)
            self.status = os.waitstatus_to_exitcode(done[1])
        return self.status

    def close(self) -> None:
        if self.status is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    def _read(self, seconds: float) -> None:
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                self.seen += os.read(self._fd, 1 << 16).decode(errors="replace")
            except OSError:  # the other end is closed
                time.sleep(0.01)


class Screen:
    """What a terminal shows: lines of so many columns, a cursor that waits behind the last one, and two commands."""

    def __init__(self, columns: int) -> None:
        self.rows, self._columns = [""], columns

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Z]|.|\n", text):
            last = self.rows[-1]
            if part == "\n":
                self.rows.append("")
            elif part.endswith("G") and part[0] == "\x1b":
                at = int(part[2:-1]) - 1  # wide characters have two columns
                while sum(2 if ord(c) > 0x2E80 else 1 for c in last) > at:
                    last = last[:-1]
                self.rows[-1] = last
            elif part != "\x1b[K":
                if sum(2 if ord(c) > 0x2E80 else 1 for c in last + part) > self._columns:
                    self.rows.append("")
                self.rows[-1] += part


@pytest.fixture(scope="module")
def terminal(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(folder, tmp_path_factory.mktemp("cache"), "--max-tokens", "3")
    terminal.expect(r"outrider: loading \S+ \(\d+ kB\) \.\.\.\r\x1b\[K")  # shown while it lasts, and forgotten
    terminal.expect("> ")
    yield terminal
    terminal.close()


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_parts_of_every_start_say_so_on_a_terminal_alone(folder: Path, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    for stderr, says in ((FakeTerminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stderr)
        LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=32, num_pages=20, speculative_config=drafts).close()
        said = stderr.getvalue()
        assert ("outrider: measuring what steps cost ...\r\x1b[K" in said) is says
        assert ("loading" in said) is says and (said == "") is not says
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(build, "_run_compiler", lambda compiler, output: None)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, "1", ""))
    text = "outrider: building the CPU kernels, once, in about 10 s"
    for stderr, said in ((FakeTerminal(), f"\r\x1b[K{text} ...\r\x1b[K"), (io.StringIO(), f"{text}\n")):
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / str(stderr.isatty())))  # nothing is built there yet
        build.build()
        assert stderr.getvalue() == said, "what only the first start waits for is told everywhere"


@pytest.fixture
def chat(terminal: Terminal) -> Terminal:
    terminal.send("/reset\r")
    terminal.expect("forgotten")
    terminal.expect("> ")
    return terminal


def test_an_earlier_line_comes_back_and_can_be_edited(chat: Terminal) -> None:
    assert chat.ask("hello\r") == FRAME + 5
    chat.send("/reset\r")
    chat.expect("forgotten")
    chat.expect("> ")
    assert chat.ask("\x1b[A\x1b[A\x7f\x7f, no\r") == FRAME + len("hel, no")


@pytest.mark.parametrize("paste", ["\x1b[200~one\ntwo\nthree\x1b[201~\r", "one\ntwo\nthree\n"], ids=["marked", "plain"])
def test_a_paste_of_several_lines_is_one_message(chat: Terminal, paste: str) -> None:
    assert chat.ask(paste) == FRAME + len("one\ntwo\nthree")


def test_a_long_paste_is_whole(chat: Terminal) -> None:
    assert chat.ask("\x1b[200~" + "word " * 1200 + "end\x1b[201~\r") == FRAME + 6003
    chat.send("/reset\r")
    chat.expect("forgotten")
    chat.expect("> ")
    assert chat.ask("x" * 5000 + "\r") == FRAME + 5000


def test_a_long_paste_becomes_a_line_with_its_length(chat: Terminal) -> None:
    chat.send("\x1b[200~" + "word " * 1200 + "end\x1b[201~\r")
    chat.expect(r"\x1b\[\d+A\r\x1b\[J> \(6,003 characters\)")
    chat.expect(r"prompt \d+ tokens")
    chat.expect("> ")


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(("text", "rows"), [
    ("one two three four", ["one two", "three four"]), ("a bb ccc dddd eeeee", ["a bb ccc", "dddd eeeee"]),
    ("0123456789 next", ["0123456789", "next"]), ("0123456789abcde word", ["0123456789", "abcde word"]),
    ("line\nnext line is", ["line", "next line", "is"]), ("漢字漢字 漢字", ["漢字漢字", "漢字"]),
    ("x" * 10 + "\ny", ["x" * 10, "y"]), ("a\tb c d", ["a       b", "c d"]), ("a\x1b[31m\x07b\x9bc", ["a[31mbc"]),
])
def test_words_are_wrapped_whole(text: str, rows: list[str], pieces: int) -> None:
    wrap, screen = WordWrap(10), Screen(10)
    for start in range(0, len(text), pieces):
        screen.write(wrap.write(text[start : start + pieces]))
    assert [row.rstrip() for row in screen.rows] == rows


def test_what_the_chat_says_of_itself_breaks_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The banner, answers to commands, errors and counts, on a terminal that is narrower than each of them."""
    assert wrapped("some words " * 20, io.StringIO()) == "some words " * 20, "a file has the line as it is"
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", out := FakeTerminal())
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    chat_command._say(f"smollm2: {chat_command.HELP}")
    output = RequestOutput("0", None, [1] * 5000, [CompletionOutput(0)])
    output.metrics = RequestMetrics(num_steps=100, num_draft_tokens=200, num_accepted_tokens=100)
    counts = re.sub(r"\x1b\[\dm", "", chat_command._stats(output, 1.0))
    shown = {chat_command.HELP: out.getvalue(), "from the cache": counts}
    for said, text in shown.items():
        rows = text.split("\n")
        assert len(rows) > 1 and max(map(len, rows)) <= 60 and said in " ".join(rows)


def test_a_long_prompt_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := FakeTerminal())
    stats = EngineStats()
    with PromptProgress(stats, 3000) as progress:
        progress.show()
        assert stderr.getvalue() == "", "the first step may be all"
        stats.num_step_tokens += 1024
        progress.show()
        assert stderr.getvalue() == "\r\x1b[Kreading the prompt: 1,024 of 3,000 tokens"
        progress.end()
        stats.num_step_tokens += 5
        progress.show()
    assert stderr.getvalue().endswith("tokens\r\x1b[K")


def test_unicode_arrives(chat: Terminal) -> None:
    assert chat.ask("é☃𝄞\r") == FRAME + len("é☃𝄞".encode())


def test_an_unknown_command_is_refused_and_a_path_is_not(chat: Terminal) -> None:
    chat.send("/rest\r")
    chat.expect(r"there is no command /rest: did you mean /reset\?")
    chat.expect("> ")
    assert chat.ask("/etc/hosts is what?\r") == FRAME + len("/etc/hosts is what?")
    chat.send("/\r")
    chat.expect(r"there is no command / ")
    chat.expect("> ")
    chat.send("/help\r")
    chat.expect("/reset forgets the conversation")
    chat.expect("> ")


def test_an_interrupt_stops_an_answer_and_at_the_prompt_asks_once(folder: Path, tmp_path: Path) -> None:
    chat = Terminal(folder, tmp_path, "--max-tokens", "12000")
    try:
        chat.expect("> ")
        chat.send("hello\r")
        chat.expect("hello\r\n(\x1b.*?\n)?.")  # the echo, and the first of the answer
        time.sleep(0.5)
        chat.send("\x03")
        assert int(chat.expect(r"\[(\d+) tokens,")[1]) < 12000
        chat.expect("> ")
        chat.send("half")
        chat.expect("half")
        chat.interrupt_prompt()
        chat.expect("Ctrl-C once more")
        chat.expect("> ")
        chat.interrupt_prompt()
        assert chat.end() == 0
        assert (tmp_path / "chat_history").read_text().splitlines()[-1] == "hello"
    finally:
        chat.close()


def test_generate_in_a_pipe_prints_what_is_finished_and_an_interrupt_keeps_it(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {i}\n" for i in range(400)))
    command = [sys.executable, "-m", "outrider.cli", "generate", str(folder), "--prompts-file", str(prompts), "--json",
               "--max-tokens", "64", "--ignore-eos", "--max-num-seqs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()  # while the others run
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=SECONDS)
    answers = [json.loads(line)["prompt"] for line in [first, *rest.splitlines()]]
    assert process.returncode == 130 and "Traceback" not in err
    assert 1 <= len(answers) < 400 and answers[0] == "prompt 0"
    assert answers == sorted(answers, key=lambda prompt: int(prompt.split()[1]))
