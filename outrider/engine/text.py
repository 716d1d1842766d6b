"""Tokenizer: converts text to tokens and back, and renders chats as text.

A tokenizer comes from a folder's tokenizer.json or from the metadata of a GGUF file. Spaces are not cleaned up after
decoding, so that text decoded in pieces equals text decoded as a whole. Does not depend on the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from outrider.core.fields import check_value, shown
from outrider.engine.gguf_tokenizer import TokenizerError, build_gguf_tokenizer
from outrider.engine.messages import ChatTemplateError, Message, up_to_the_end_of, with_plain_content

log = logging.getLogger("outrider")
__all__ = ["ChatTemplateError", "Message", "Tokenizer", "TokenizerError"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
CONTENT = ("tools", "documents")  # variables that carry what a user gives the model to read
MOST_EXPLAINED = 100  # names of variables that the log may say: clients choose them
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"


class TokenTexts(dict[int, str]):
    """The texts of single tokens by id, each decoded when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        return self.setdefault(token_id, self._tokenizer.decode([token_id], skip_special_tokens=False))


class Encoded(dict[str, Any]):
    """The token ids of one or several texts, as a dict that also has attributes, like the results of transformers'
    tokenizers."""

    @property
    def input_ids(self) -> list[Any]:
        return self["input_ids"]


class Tokenizer:
    """A tokenizer of the library `tokenizers`, with the special tokens and chat templates of a model."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        source: str = "this model",
    ) -> None:
        # A file may carry settings of its training; a prompt is never cut or filled up behind the caller's back.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.source = source
        self._explained: set[str] = set()  # variables of templates that the log has named

    @classmethod
    def load(cls, data: str | Path | Mapping[str, Any]) -> Tokenizer:
        """Load a tokenizer from the files of a model: a folder, or the metadata of a GGUF file."""
        return cls.from_gguf(data) if isinstance(data, Mapping) else cls.from_folder(Path(data))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(_missing(folder))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"{path} cannot be read: {error}. Fetch it again.") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = {**_token_texts(_read_json(folder / "special_tokens_map.json")), **_token_texts(config)}
        return cls(backend, special, _folder_templates(folder, config), str(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        backend = build_gguf_tokenizer(metadata)
        tokens, special = metadata["tokenizer.ggml.tokens"], {}
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
            index = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if index is not None and 0 <= index < len(tokens):
                special[f"{name}_token"] = tokens[index]
        templates = {}
        for key, value in metadata.items():
            if key == "tokenizer.chat_template":
                templates[DEFAULT_TEMPLATE] = str(value)
            elif key.startswith("tokenizer.chat_template."):
                templates[key.removeprefix("tokenizer.chat_template.")] = str(value)
        return cls(backend, special, templates, str(metadata.get("general.name", "this model")))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_value("a prompt", str, text)
        return self.encoding(text, add_special_tokens).ids

    def encoding(self, text: str | tuple[str, str], add_special_tokens: bool = True) -> tokenizers.Encoding:
        """Encode a text or a pair of texts, and return the library's object, without the tokens' positions in the text.
        The library's method for a batch is used, because the one for a single text blocks all other threads, for a
        second per megabyte."""
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        if isinstance(text, str):
            return Encoded(input_ids=self.encode(text, add_special_tokens))
        return Encoded(input_ids=[self.encode(one, add_special_tokens) for one in text])

    def __len__(self) -> int:
        return self.vocab_size

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str | None]:
        return [self.id_to_token(token_id) for token_id in self.all_special_ids]

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The text of each token when it is decoded alone, including special tokens."""
        return TokenTexts(self)

    @cached_property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones. The model's vocabulary may be larger, because it may be
        padded."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out of the text."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | None | list[str | None]:
        """Return the token of an id, or the tokens of several ids, as the tokenizer's file writes them."""
        return self.id_to_token(ids) if isinstance(ids, int) else [self.id_to_token(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | None | list[int | None]:
        return self.token_to_id(tokens) if isinstance(tokens, str) else [self.token_to_id(token) for token in tokens]

    def __getattr__(self, name: str) -> Any:
        if name in SPECIAL_TOKENS:
            return self.special_tokens.get(name)
        raise AttributeError(f"this tokenizer has no {name!r}: AutoTokenizer.from_pretrained of transformers makes one "
                             "with all methods")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def render_chat(
        self,
        messages: Iterable[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        hints: Mapping[str, Any] | None = None,
        keeps_parts: bool = False,
        **variables: Any,
    ) -> str:
        """Render the prompt of a chat. The prompt ends where an answer begins (`add_generation_prompt`, the default),
        or within the last message (`continue_final_message`). `chat_template`: a template, or the name of one of the
        model's. The template must use every further variable in `variables`. Variables in `chat_template_kwargs`, which
        scripts send to every model, may be unused, and the log names each of these once; unused `hints` are not logged.
        `keeps_parts`: the template reads lists of parts. May take seconds, so an event loop calls it in a thread."""
        from outrider.engine.templates import compiled_template  # with Jinja, whose import a plain prompt must not pay

        messages = list(messages) if isinstance(messages, Iterable) else messages
        check_value("messages", list[dict[str, Any]], messages)
        check_value("add_generation_prompt", bool | None, add_generation_prompt)
        check_value("continue_final_message", bool, continue_final_message)
        check_value("chat_template_kwargs", dict[str, Any] | None, chat_template_kwargs)
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message: it continues the last message, and add_generation_prompt "
                                    "begins a new one: only one of them can be true")
        for name in {"messages", "add_generation_prompt"} & (chat_template_kwargs or {}).keys():
            raise ChatTemplateError(f"chat_template_kwargs must not set {name}: give {name} as an argument beside it")
        if chat_template_content_format not in ("auto", "string"):
            raise ChatTemplateError(f"chat_template_content_format={shown(chat_template_content_format)} is not "
                                    "supported: templates get the content of a message as text")
        messages = [with_plain_content(message, keeps_parts) for message in messages]
        template = compiled_template(self._template_text(chat_template, bool(tools)))
        asked = {"tools": tools, **variables, **(chat_template_kwargs or {})}
        given = [name for name, value in asked.items() if value is not None and value != []]
        may_ignore = (chat_template_kwargs or {}).keys() - set(CONTENT)
        template.check_variables(name for name in given if name not in may_ignore)
        self._explain(template.unused(name for name in given if name in may_ignore))
        values = {"documents": None, **self.special_tokens, **(hints or {}), **asked}
        if not continue_final_message:
            return template.render(messages, add_generation_prompt is not False, values)
        return up_to_the_end_of(messages, template.render(messages, False, values))

    def _explain(self, unused: Mapping[str, str]) -> None:
        """Log, once for each of these variables, that the template does not use it."""
        for name, why in unused.items():
            if name not in self._explained and len(self._explained) < MOST_EXPLAINED:
                self._explained.add(name)
                log.warning("chat_template_kwargs: %s has no effect: %s", name[:100], why)

    def apply_chat_template(self, conversation: Iterable[Message], tools: Sequence[Mapping[str, Any]] | None = None, *,
                            tokenize: bool = True, add_generation_prompt: bool = False,
                            **options: Any) -> str | list[int]:
        """Render a chat as text or token ids, like the method of this name in transformers."""
        text = self.render_chat(conversation, tools=tools, add_generation_prompt=add_generation_prompt, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def encode_chat(self, messages: Iterable[Message], **options: Any) -> list[int]:
        """Render a chat and return its token ids. No special tokens are added, because the template writes them
        itself."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _template_text(self, wanted: str | None, has_tools: bool) -> str:
        if wanted is not None:
            check_value("chat_template", str, wanted)
            return self.chat_templates.get(wanted, wanted)
        if has_tools and TOOL_TEMPLATE in self.chat_templates:
            return self.chat_templates[TOOL_TEMPLATE]
        if DEFAULT_TEMPLATE in self.chat_templates:
            return self.chat_templates[DEFAULT_TEMPLATE]
        if self.chat_templates:
            names = ", ".join(sorted(self.chat_templates))
            raise ChatTemplateError(f"{self.source} has no default chat template: name one of {names} (--chat-template "
                                    "NAME; in Python chat_template=)")
        raise ChatTemplateError(f"{self.source} has no chat template, so it may not be a chat model: have it "
                                "continue a prompt (`outrider generate`, LLM.generate, /v1/completions), or give a "
                                "template (--chat-template FILE of `outrider chat`, `generate` and `serve`; in Python "
                                "chat_template=)")


def _missing(folder: Path) -> str:
    others = [n for n in ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt") if (folder / n).is_file()]
    if others:
        return (f"{folder} holds {', '.join(others)} but no tokenizer.json, the only form that is read. Write one with "
                "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
    return (f"{folder} holds no tokenizer.json: copy the tokenizer files of the model into it "
            "(tokenizer.json, tokenizer_config.json), or give token ids from Python: "
            'LLM(folder, skip_tokenizer_init=True).generate({"prompt_token_ids": [...]})')


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object. Fetch it again.")
    return value


def _token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name. A file writes each as a string or as an object with `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return all chat templates of a folder by name. Separate files win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    for written in (config.get("chat_template"), _read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(written, str):
            templates[DEFAULT_TEMPLATE] = written
        elif isinstance(written, list):
            try:
                templates.update({t["name"]: t["template"] for t in written})
            except (KeyError, TypeError) as error:
                raise TokenizerError(f"{folder}: tokenizer_config.json has a chat_template without a name or a "
                                     f"template ({error!r}): correct it, or fetch the file again") from error
    if (folder / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates
