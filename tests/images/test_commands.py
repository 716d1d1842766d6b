"""Images on the command line and in LLM.chat."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from outrider import LLM, SamplingParams
from outrider.commands import chat as chat_command
from outrider.commands import generate
from outrider.commands.conversation import Conversation
from outrider.commands.image_files import image_url
from outrider.core.outputs import CompletionOutput, RequestOutput
from tests.engine.harness import Rig, tiny_model
from tests.images.made_images import WRITTEN, data_url, picture, png, written
from tests.server.image_rig import image_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a photo.png"
    path.write_bytes(png())
    return path


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_file_becomes_a_data_url(tmp_path: Path, kind: str) -> None:
    path, data = tmp_path / "x", written(Image.fromarray(picture(3, 4)), kind)
    path.write_bytes(data)
    assert image_url(f" '{path}' ") == data_url(data, kind.lower())


def test_a_file_that_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("text")
    with pytest.raises(ValueError, match="is not an image of these formats"):
        image_url(str(tmp_path / "x.png"))
    with pytest.raises(ValueError, match="there is no file"):
        image_url(str(tmp_path / "y.png"))


class Recorded(Conversation):
    def _ask(self, messages: list[dict[str, Any]], show: Callable[[str], None], priority: int) -> RequestOutput:
        self.asked = messages
        return RequestOutput("0", None, [], [CompletionOutput(0)])


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> Recorded:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    conversation = Recorded(None)
    chat_command._talk(conversation, argparse.Namespace(url=None, model="m", stats=False, priority=0))
    return conversation


def test_an_image_goes_with_the_next_question(file: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(monkeypatch, f"/image {file}", f"/image '{file}'", "What?", "And now?")
    part = {"type": "image_url", "image_url": {"url": data_url(png())}}
    assert conversation.asked[0]["content"] == [part, part, {"type": "text", "text": "What?"}]
    assert conversation.asked[2]["content"] == "And now?"
    assert "a photo.png with your next question" in capsys.readouterr().out


def test_a_wrong_image_is_told_and_the_chat_goes_on(monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(monkeypatch, "/image", "/image /none.png", "/imag", "hi")
    said = capsys.readouterr().out
    assert "/image needs the path" in said and "there is no file /none.png" in said and "did you mean /image?" in said
    assert conversation.asked == [{"role": "user", "content": "hi"}]


def test_reset_forgets_images(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, f"/image {file}", "/reset", "hi").asked == [{"role": "user", "content": "hi"}]


@pytest.fixture
def llm() -> LLM:
    engine = Rig(tiny_model("llama", torch.float32), tokenizer=image_tokenizer()).engine
    object.__setattr__(engine.model, "takes_images", True)
    return LLM.around(engine)


def test_images_in_llm_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(llm, "generate", lambda prompts, *_, **__: seen.extend(prompts))
    own = [{"role": "user", "content": [{"type": "image", "image": picture(5, 7)}, {"type": "text", "text": "a"}]}]
    llm.chat([own, [{"role": "user", "content": "b"}]], SamplingParams(max_tokens=1))
    pad = image_tokenizer().token_to_id("<|image_pad|>")
    assert seen[0]["prompt_token_ids"] == [*b"[user]", pad, *b"a[assistant]"]
    assert np.array_equal(seen[0]["multi_modal_data"]["image"][0], picture(5, 7))
    assert seen[1] == [*b"[user]b[assistant]"]


def test_a_model_of_texts_refuses_images_in_llm_chat(llm: LLM) -> None:
    object.__setattr__(llm.engine.model, "takes_images", False)
    with pytest.raises(ValueError, match="'image' in a message is not supported"):
        llm.chat([{"role": "user", "content": [{"type": "image", "image": picture(5, 7)}]}])


def test_generate_puts_images_before_the_text(llm: LLM, file: Path) -> None:
    ask = generate._ask_about(llm, "What?", [image_url(str(file))], SamplingParams(), "Be brief", None)
    pad = image_tokenizer().token_to_id("<|image_pad|>")
    assert ask.token_ids == [*b"[system]Be brief[user]", pad, *b"What?[assistant]"]
    assert np.array_equal(ask.inputs["multi_modal_data"]["image"][0], picture(5, 7))


def test_generate_takes_images_in_chats_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from outrider.cli import main

    assert main(["generate", "x", "--prompt", "a", "--image", "b"]) == 2
    assert "--image needs --chat" in capsys.readouterr().err
