"""Reads and checks files that commands are given, before a model is loaded or a server reports that it is ready. No
torch, no weights."""

from __future__ import annotations

from pathlib import Path

from outrider.config import EngineConfig
from outrider.engine.load import read_tokenizer
from outrider.engine.text import Tokenizer, TokenizerError
from outrider.models.sources import ModelSource, resolve


def check_files(engine: EngineConfig, template: str | None) -> None:
    """Raise ValueError for a model, drafter, tokenizer or template that does not exist, and for a length that exceeds
    the model's positions. For a hub id only the small files are fetched. `template`: the result of `chat_template`."""
    source = resolve(engine.model, engine.revision, False, engine.download_dir)
    positions = source.reader().text_section().optional("max_position_embeddings", int)
    if engine.max_model_len is not None and positions is not None and engine.max_model_len > positions:
        raise ValueError(f"max_model_len ({engine.max_model_len}) exceeds the {positions} positions the model was made "
                         f"for ({source.config_file}: max_position_embeddings). Lower max_model_len")
    if engine.speculative is not None and engine.speculative.model is not None:
        resolve(engine.speculative.model, weights=False)
    if engine.tokenizer is not None or _is_name(template):
        check_template_name(template, _tokenizer(engine, source))


def _tokenizer(engine: EngineConfig, source: ModelSource) -> Tokenizer | None:
    try:
        return read_tokenizer(engine, source)
    except TokenizerError:
        if engine.tokenizer is not None:
            raise
        return None


def _is_name(template: str | None) -> bool:
    """Whether the template is given by its name, not as text."""
    return template is not None and "{" not in template


def chat_template(given: str | None) -> str | None:
    """Return the template's text, or the name of one of the model's templates. Raises ChatTemplateError for a text that
    is not a template. `given`: the value of --chat-template, which may be a file."""
    if given is None or not ("{" in given or Path(given).is_file()):
        return given
    from outrider.engine.templates import compiled_template

    text = given if "{" in given else _read(Path(given))
    if "{" not in text:
        raise ValueError(f"--chat-template {given} is not a Jinja template: it holds no {{, so every prompt would be "
                         "this text alone. Give a file with a template")
    compiled_template(text)
    return text


def check_template_name(template: str | None, tokenizer: Tokenizer | None) -> None:
    """Refuse a name that none of the model's templates has. Otherwise the name itself would be the template, and every
    prompt would consist of the name."""
    known = {} if tokenizer is None else tokenizer.chat_templates
    if _is_name(template) and template not in known:
        raise ValueError(f"--chat-template {template!r} is neither a file, nor a template, nor one of the model's "
                         f"templates ({', '.join(sorted(known)) or 'the model has none'}): give one of these")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"--chat-template {path} cannot be read: {why}") from None
