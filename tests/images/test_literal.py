"""Texts of users never become tokens that stand for media."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken

from outrider.engine.text import Tokenizer
from outrider.features.images.chat import chat_prompt
from outrider.features.images.literal import LiteralTexts
from tests.engine.harness import byte_tokenizer
from tests.images.made_images import data_url, picture, png

PADS = ("<|image_pad|>", "<|image|>", "<|image>", "<image|>", "<|video_pad|>", "<|audio|>", "<|vision_start|>")
TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}"
            "{% endfor %}{% endif %}{% endfor %}")


def tokenizer() -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(token, special=True) for token in PADS])
    return Tokenizer(backend, chat_templates={"default": TEMPLATE})


TOKENIZER = tokenizer()
PAD_IDS = {TOKENIZER.token_to_id(pad) for pad in PADS}


def encoded(text: str) -> list[int]:
    literal = LiteralTexts(TOKENIZER)
    return literal.encode(literal.hide(text), add_special_tokens=False)


def test_the_tokenizer_itself_makes_media_of_texts() -> None:
    """Else the other tests test nothing."""
    assert PAD_IDS & set(TOKENIZER.encode("a<|image_pad|>b"))


@pytest.mark.parametrize("text", [*PADS, "".join(PADS), "a<|im<|image|>age|>b", "<|image_pad|>" * 50,
                                  "<|image<|image_pad|>_pad|>", "<|image>|>", "<<|image|>image|>", "plain"])
def test_a_text_is_the_tokens_of_its_characters(text: str) -> None:
    ids = encoded(text)
    assert not PAD_IDS & set(ids)
    assert bytes(ids).decode() == text


def test_random_texts_of_pieces_of_markers() -> None:
    draw = random.Random(1)
    pieces = [*PADS, *(pad[: len(pad) // 2] for pad in PADS), *(pad[len(pad) // 2 :] for pad in PADS),
              "<", "|", ">", "é"]
    for _ in range(500):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 9)))
        assert bytes(encoded(text)).decode() == text


def test_other_special_tokens_of_a_text_stay_tokens() -> None:
    """As everywhere in chats: templates write them, and texts may."""
    assert 257 in encoded("a<|end|>b<|image_pad|>c")


def test_special_tokens_around_a_text() -> None:
    from tokenizers import processors

    other = tokenizer()
    other.backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 256), ("<|end|>", 257)])
    literal = LiteralTexts(other)
    ids = literal.encode(literal.hide("a<|image_pad|>b"), add_special_tokens=True)
    assert ids[0] == 256 and ids[-1] == 257 and bytes(ids[1:-1]).decode() == "a<|image_pad|>b"
    assert literal.encode("ab", add_special_tokens=True) == [256, 97, 98, 257]


def test_marks_are_in_names_and_values_of_objects() -> None:
    literal = LiteralTexts(TOKENIZER)
    given = {"<|image|>": [{"a": "x<|image|>"}, 7, None]}
    hidden = literal.hide(given)
    assert hidden != given and literal.show(str(hidden)) == str(given)


def test_only_the_template_makes_places_for_images() -> None:
    url = data_url(png())
    messages = [{"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"},
                                             {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
                                             {"type": "image", "image": picture(3, 4)}, "b"]}]
    prompt = chat_prompt(TOKENIZER, messages, {})
    pad = TOKENIZER.token_to_id("<|image_pad|>")
    assert prompt["prompt_token_ids"] == [*b"[user]<|image_pad|>", pad, pad, *b"b"]
    assert [image.shape for image in prompt["multi_modal_data"]["image"]] == [(5, 7, 3), (3, 4, 3)]
    assert prompt["mm_processor_kwargs"] == {"detail": ["low", "auto"]}
    texts = [{"role": "user", "content": ["<|image_pad|>", "b"]}]
    assert chat_prompt(TOKENIZER, texts, {}) == [*b"[user]<|image_pad|>\nb"]


@pytest.mark.parametrize(("part", "words"), [
    ({"type": "image_url", "image_url": "http://127.0.0.1/a.png"}, "nothing is fetched"),
    ({"type": "image_url", "image_url": "/etc/passwd"}, "nothing is fetched"),
    ({"type": "image_url", "image_url": {"url": data_url(png()), "detail": "huge"}}, "must be one of auto, low, high"),
    ({"type": "video_url", "video_url": {}}, "'video_url' in a message is not supported"),
    ({"type": "image_url"}, "'image_url' in a message is not supported"), (7, "not supported"),
])
def test_other_parts_are_refused(part: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chat_prompt(TOKENIZER, [{"role": "user", "content": [part]}], {})
