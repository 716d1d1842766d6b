"""Tokenizers from folders and GGUF metadata, chat templates, and what is said when files are missing or wrong."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from outrider.engine.text import ChatTemplateError, Tokenizer, TokenizerError

CORPUS = ["the cat sat on the mat 1234", "def f(x): return x + 1", "naïve 日本 😀 don't won't I'LL", " a\n\n\tb  "]
TEXTS = ["the cat", "I'LL won't 12345 x", "naïve 日本 😀🎉", "a  b   \n\n c\t", "", "x<|end|>the", "½ Ⅷ ٣٤ _-+",
         "हिन्दी में ไทย", "HTTPServer/x\r\n\r\n/ snake_case", "don’t “q” — …", "𝕳𝖊 \u200d\ufeff ٣\u00a0b", " \n \t  x",
         "日本語123テキスト", "#include <a.h>//b", '""" ``` !!!x']
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def trained(pre: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def gguf_metadata(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """What a GGUF file would say about a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    tokens = [t for t, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in ("<|begin|>", "<|end|>") else 1 for t in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **more,
    }


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
PRE = {
    "gpt-2": BYTES,
    "smollm": pre_tokenizers.Sequence([DIGITS, BYTES]),
    "llama-bpe": split_by(WORDS + r"\p{N}{1,3}" + REST),
    "smaug-bpe": split_by(WORDS + r"\p{N}{1,3}" + REST),
    "glm4": split_by(WORDS + r"\p{N}{1,3}" + REST),
    "qwen2": split_by(WORDS + r"\p{N}" + REST),
    "deepseek-r1-qwen": split_by(WORDS + r"\p{N}" + REST),
    "qwen35": split_by(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
                       r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "tekken": split_by(r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                       r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                       r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "deepseek-v3": split_by(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"
                            r"[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
}


@pytest.mark.parametrize("pre", sorted(PRE))
def test_gguf_metadata_gives_the_tokens_of_the_tokenizer_it_was_made_from(pre: str) -> None:
    backend = trained(PRE[pre])
    tokenizer = Tokenizer.load(gguf_metadata(backend, pre, **{"tokenizer.ggml.add_bos_token": False}))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode("x<|end|>the")) == "xthe"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_token_ids == {0, 1}


@pytest.mark.parametrize("pre", ["qwen2", "qwen35"])
def test_characters_are_composed_as_transformers_composes_them(pre: str) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    meta = gguf_metadata(trained(PRE[pre]), pre, **{"tokenizer.ggml.add_bos_token": False})
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    theirs = (Qwen2Tokenizer if pre == "qwen2" else Qwen3_5Tokenizer)(vocab=vocab, merges=merges)
    ours = Tokenizer.load(meta)
    for text in (*TEXTS, "e\u0301 \u212b नि\u0902"):
        if "<|end|>" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_gguf_metadata_says_which_tokens_go_around_a_text() -> None:
    meta = gguf_metadata(trained(BYTES), "gpt-2", **{"tokenizer.ggml.add_bos_token": True})
    tokenizer = Tokenizer.load({**meta, "tokenizer.ggml.add_eos_token": True})
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.encode("the cat") == [0, *plain, 1]
    assert tokenizer.encode("the cat") == [0, *plain, 1] and tokenizer.encode("") == [0, 1]
    assert Tokenizer.load(gguf_metadata(trained(PRE["llama-bpe"]), "llama-bpe")).encode("the cat")[0] == 0


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    special = ["<unk>", "<s>", "</s>"]
    pieces = ["▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "at", "▁c", "▁cat", "th"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *(f"<0x{b:02X}>" for b in range(256)), *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def test_sentencepiece_metadata_gives_pieces_bytes_and_the_leading_space() -> None:
    tokenizer = Tokenizer.load(sentencepiece_metadata())
    ids = tokenizer.encode("the cat é\n")
    names = [tokenizer.id_to_token(i) for i in ids]
    assert names == ["<s>", "▁the", "▁cat", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(ids) == "the cat é\n"
    bare = Tokenizer.load(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert [bare.id_to_token(i) for i in bare.encode("the", add_special_tokens=False)] == ["t", "he"]


def test_sentencepiece_metadata_with_merges_gives_the_tokens_of_transformers() -> None:
    from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("\n", "\n")]
    special, letters = ["<pad>", "<eos>", "<bos>", "<unk>"], ["▁", "t", "h", "e", "c", "a", "\n"]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *letters, *(a + b for a, b in merges)]
    meta = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges], "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1}
    theirs = GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    ours = Tokenizer.load(meta)
    for text in (*TEXTS, "the cat", " the\n\n the  cat\n"):
        if "<|end|>" not in text:
            plain = ours.encode(text, add_special_tokens=False)
            assert plain == theirs.encode(text, add_special_tokens=False), text
            assert ours.encode(text) == [2, *plain] and ours.decode(plain) == text


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_metadata_gives_the_tokens_of_transformers(lowercase: bool) -> None:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "naive", "Naïve", "don", "'", "t", "日",
             "##1", "1", "!", ",", "-", "##-"]
    vocab = {word: i for i, word in enumerate(words)}
    tokens = [w if w.startswith("[") else w[2:] if w.startswith("##") else f"▁{w}" for w in words]
    meta = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.unknown_token_id": 1,
            "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(words) - 5), "tokenizer.ggml.cls_token_id": 2,
            "tokenizer.ggml.seperator_token_id": 3, "tokenizer.ggml.normalizer.lowercase": lowercase}
    theirs, ours = BertTokenizer(vocab=vocab, do_lower_case=lowercase), Tokenizer.load(meta)
    for text in (*TEXTS, "The cats, the CAT-s!", "Naïve naïve don't 11", "日日 cat\tthe"):
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.decode(ours.encode("the cats")) == "the cats"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "kimi-k2"}, "'kimi-k2' is not supported; .*smollm"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores"),
    ],
)
def test_gguf_tokenizers_that_are_not_known_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(sentencepiece_metadata(**change))


@pytest.mark.parametrize("change", [
    {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["t h", "zz zz"]},
    {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": 5},
    {"tokenizer.ggml.unknown_token_id": 10**6}, {"tokenizer.ggml.bos_token_id": 10**6},
    {"tokenizer.ggml.token_type": [1]}, {"tokenizer.ggml.tokens": 7},
])
def test_damaged_gguf_tokenizers_are_named(change: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match="the tokenizer of the GGUF file is damaged|holds no tokenizer.ggml"):
        Tokenizer.load(sentencepiece_metadata(**change))


@pytest.mark.parametrize(("key", "value"), [
    ("padding_token_id", "x"), ("unknown_token_id", [0]), ("bos_token_id", 0.5), ("tokens", "x"), ("tokens", [1, 2]),
    ("merges", 3), ("scores", "x"), ("token_type", [1.5])])
def test_a_value_of_another_type_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(TokenizerError, match=rf"damaged: tokenizer.ggml.{key} must be "):
        Tokenizer.load(gguf_metadata(trained(BYTES), "gpt-2", **{f"tokenizer.ggml.{key}": value}))


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    backend = trained(BYTES)
    backend.post_processor = processors.TemplateProcessing("<|begin|> $A", "<|begin|> $A $B", [("<|begin|>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_gives_tokens_special_tokens_and_template(tmp_path: Path) -> None:
    end = {"content": "<|end|>", "special": True}
    template = "{{ bos_token }}{% for m in messages %}\n{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\n"
    config = {"bos_token": "<|begin|>", "eos_token": end, "pad_token": None, "chat_template": template}
    tokenizer = Tokenizer.load(write_folder(tmp_path, config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    ids = tokenizer.encode("the cat sat on the mat")
    assert ids[0] == 0 and len(ids) > 4, "what tokenizer.json says about truncation must not cut a prompt"
    # trim_blocks: the line break after a tag is not part of the prompt.
    assert tokenizer.render_chat(CHAT) == "<|begin|>user: hi<|end|>\nassistant: yo<|end|>\n"
    chat_ids = tokenizer.encode_chat(CHAT)
    assert chat_ids.count(0) == 1, "the template writes the beginning; it is not added twice"


def test_templates_come_from_files_lists_and_arguments(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools {{ tools | tojson }}"}]
    tokenizer = Tokenizer.load(write_folder(tmp_path, {"chat_template": listed}))
    assert tokenizer.render_chat(CHAT) == "listed"
    assert tokenizer.render_chat(CHAT, tools=[{"name": "<é>"}]) == 'tools [{"name": "<é>"}]'
    assert tokenizer.render_chat(CHAT, chat_template="tool_use", tools=[]) == "tools []"
    assert tokenizer.render_chat(CHAT, chat_template="{{ messages | length }} {{ mood }}", mood="ok") == "2 ok"
    (tmp_path / "chat_template.jinja").write_text("from a file{% if add_generation_prompt %} go{% endif %}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render_chat(CHAT) == "from a file go"
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == "from a file"


def test_templates_have_the_helpers_they_expect() -> None:
    tokenizer = Tokenizer(trained(BYTES))
    template = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %} {{ strftime_now('%Y') | length }}"
    )
    assert tokenizer.render_chat(CHAT, chat_template=template) == "hi 4"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "not valid"),
        ("{{ messages.append(1) }}", "refused"),  # the sandbox: nothing may be changed
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages[0].content + 1 }}", "refused"),
    ],
)
def test_a_template_that_fails_says_why_and_cannot_escape(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        Tokenizer(trained(BYTES)).render_chat(CHAT, chat_template=template)


def test_a_model_without_template_says_what_to_do() -> None:
    backend = trained(BYTES)
    with pytest.raises(ChatTemplateError, match="no chat template.*generate.*/v1/completions.*--chat-template"):
        Tokenizer(backend).render_chat(CHAT)
    with pytest.raises(ChatTemplateError, match="name one of rag"):
        Tokenizer(backend, chat_templates={"rag": "x"}).render_chat(CHAT)


def test_gguf_metadata_brings_its_chat_templates() -> None:
    more = {"tokenizer.chat_template": "plain {{ eos_token }}", "tokenizer.chat_template.rag": "rag"}
    tokenizer = Tokenizer.load(gguf_metadata(trained(BYTES), "gpt-2", **more))
    assert tokenizer.render_chat(CHAT) == "plain <|end|>"
    assert tokenizer.render_chat(CHAT, chat_template="rag") == "rag"


def test_missing_and_damaged_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="holds no tokenizer.json: copy.*skip_tokenizer_init"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match="tokenizer.model but no tokenizer.json.*save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer.json cannot be read"):
        Tokenizer.load(tmp_path)
    write_folder(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("{'")
    with pytest.raises(TokenizerError, match="tokenizer_config.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """A server's event loop is one of them, and other tenants' streams are in it."""
    tokenizer, num_ticks, is_done = Tokenizer(trained(PRE["qwen2"])), 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_done.wait(0.001):
            num_ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        before = num_ticks
        encoding = tokenizer.encoding("x1 " * 300_000)
        num_meanwhile = num_ticks - before
    finally:
        is_done.set()
        ticking.join()
    assert len(encoding.ids) >= 300_000 and num_meanwhile > 10
