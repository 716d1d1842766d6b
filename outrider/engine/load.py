"""Finds the files of the model and its tokenizer, with which an engine starts."""

from __future__ import annotations

import logging
from typing import Annotated

from outrider.config import EngineConfig
from outrider.core.fields import NotEmpty, Text, check_value
from outrider.engine.text import Tokenizer, TokenizerError
from outrider.models.sources import ModelSource, resolve, tokenizer_files
from outrider.models.sources.stored_form import check_form

log = logging.getLogger("outrider")


def find_model(config: EngineConfig) -> ModelSource:
    """Find the files of the model, and download them if need be."""
    source = resolve(config.model, config.revision, config.load_format != "dummy", config.download_dir)
    source = source.with_values(config.hf_overrides or {}).without_keys(config.ignore_config_keys)
    if config.quantization is not None:
        check_form(config.quantization, source)
    return _with_class_ids(config, source)


def _with_class_ids(config: EngineConfig, source: ModelSource) -> ModelSource:
    """Replace the texts of `classifier_from_token` in the model's config by token ids. The logits of these tokens are
    the scores of classes."""
    tokens = source.config.get("classifier_from_token")
    if tokens is None:
        return source
    check_value("classifier_from_token", Annotated[list[Text], NotEmpty], tokens)
    tokenizer = read_tokenizer(config, source)
    ids = [tokenizer.token_to_id(token) for token in tokens]
    if None in ids:
        raise ValueError(f"classifier_from_token: the tokenizer has no token {tokens[ids.index(None)]!r}: name tokens "
                         "of this tokenizer")
    return source.with_values({"classifier_from_token": ids})


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer | None:
    """Load the model's tokenizer. If there are no tokenizer files, log a warning and return None: prompts and outputs
    can still be token ids."""
    if config.skip_tokenizer_init:
        return None
    try:
        return read_tokenizer(config, source)
    except TokenizerError as error:
        if config.tokenizer is not None:
            raise
        # A kept record must not keep the engine: the error becomes a text.
        log.warning("there is no tokenizer, so prompts must be token ids: %s", str(error))
        return None


def read_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer:
    if config.tokenizer is not None:
        files, path = tokenizer_files(config.tokenizer, config.revision, config.download_dir), config.tokenizer
    else:
        files, path = source.tokenizer(), str(source.path)
    try:
        return Tokenizer.load(files)
    except TokenizerError as error:  # the metadata of a GGUF file does not say which file that is
        raise error if path in str(error) else TokenizerError(f"{path}: {error}") from None
