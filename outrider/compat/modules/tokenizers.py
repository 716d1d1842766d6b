"""Stands for `vllm.tokenizers`: loads a model's tokenizer."""

from __future__ import annotations

from outrider.engine.text import Tokenizer
from outrider.models.sources import tokenizer_files

__path__: list[str] = []  # a package in vLLM: see compat/not_here.py
__all__ = ["TokenizerLike", "get_tokenizer"]

TokenizerLike = Tokenizer


def get_tokenizer(tokenizer_name: str, *, tokenizer_mode: str = "auto", trust_remote_code: bool = False,
                  revision: str | None = None, download_dir: str | None = None) -> Tokenizer:
    """The tokenizer of a folder, a GGUF file or a hub id. No remote code is run; the files describe the tokenizer."""
    return Tokenizer.load(tokenizer_files(str(tokenizer_name), revision, download_dir))


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"{__name__}.{name} is not supported: use get_tokenizer, or LLM.get_tokenizer")
