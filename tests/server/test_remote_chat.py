"""`outrider chat --url`: the same chat with the model of a server."""

from __future__ import annotations

import io
import sys

import pytest

from outrider.cli import main
from outrider.commands.http_stream import Address
from outrider.commands.remote_chat import RemoteConversation, request_body
from outrider.core.params import SamplingParams
from tests.server.rig import MODEL, Served, served_fixture

served = served_fixture(api_key=("k",))


def test_it_talks_and_remembers(served: Served, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n/reset\nhello\nrefuse\n/exit\n"))
    flags = ["--temperature", "0", "--max-tokens", "8", "--top-k", "5", "--stats"]
    assert main(["chat", "--url", served.url, "--api-key", "k", *flags]) == 0
    out, err = capsys.readouterr()
    stats = [line for line in err.splitlines() if "tokens/s" in line]
    assert len(stats) == 3 and "8 tokens" in stats[0] and "drafts accepted" in err
    lengths = [int(line.split("prompt ")[1].split()[0]) for line in stats]
    assert lengths[1] > lengths[0] == lengths[2], "the second turn has the first one before it"
    assert "No." in err, "a refused question is said and leaves no trace"
    assert out.count("(forgotten)") == 1


def test_what_is_wrong_is_one_line(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in [(["--url", "http://127.0.0.1:9"], "no server answers at"),
                         (["--url", served.url], "status 401"), (["--url", "ftp://x"], "is not the address of"),
                         (["--url", served.url, "--chat-template", "x"], "--chat-template is a setting of the server"),
                         (["--url", served.url, "--api-key", "k", "--dtype", "float32"], "--dtype is a setting of")]:
        assert main(["chat", *flags]) != 0
        assert words in capsys.readouterr().err


def test_an_interrupt_ends_the_request_and_keeps_its_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.commands import remote_chat
    from outrider.commands.run_prompts import Interrupt

    interrupt = Interrupt()

    class Always:
        def __enter__(self) -> Interrupt:
            return interrupt

        def __exit__(self, *exc: object) -> None: ...

    def show(text: str) -> None:
        interrupt.is_set = interrupt.is_set or bool(text)

    monkeypatch.setattr(remote_chat, "interruptible", Always)
    body = request_body(SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    conversation = RemoteConversation(Address.parse(served.url), MODEL, body, "Be short.", "k")
    output = conversation.answer("hello", show)
    assert output.outputs[0].text and [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    served.assert_idle()


def test_only_what_says_something_is_sent() -> None:
    assert request_body(SamplingParams()) == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
    body = request_body(SamplingParams(top_k=3, seed=1))
    assert body == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16, "top_k": 3, "seed": 1}
