"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE, or SentencePiece-style BPE.

The metadata names a pre-tokenizer instead of describing it; the ones known are listed here and any other is
refused by name, because a wrong one gives other tokens without any error. Knows nothing of files or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
SPACE = "▁"  # what SentencePiece writes for a space

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")


class TokenizerError(ValueError):
    """Tokenizer files are missing, damaged or of a kind that is not supported."""


def build_gguf_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    kind = meta.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in meta:
        raise TokenizerError("the GGUF file holds no tokenizer (tokenizer.ggml.model, tokenizer.ggml.tokens); "
                             "convert the model again with its tokenizer, or use its safetensors folder")
    try:
        match kind:
            case "gpt2":
                tokenizer = _byte_level(meta)
            case "llama":
                tokenizer = _sentencepiece(meta)
            case _:
                raise TokenizerError(f"tokenizer.ggml.model = {kind!r} is not supported; supported: gpt2, llama")
        _add_special_tokens(tokenizer, meta)
        _add_ends(tokenizer, meta)
    except TokenizerError:
        raise
    except Exception as error:  # ids beyond the tokens, values of other types; the library raises bare Exceptions
        raise TokenizerError(f"the tokenizer of the GGUF file is damaged ({error}); fetch the file again, or "
                             "convert the model again") from error
    return tokenizer


def _byte_level(meta: Mapping[str, Any]) -> Tokenizer:
    pre = meta.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre = {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    if "tokenizer.ggml.merges" not in meta:
        raise TokenizerError("the GGUF file holds no tokenizer.ggml.merges; convert the model again")
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    # A token may itself begin with a space, so the space that parts the two is looked for after the first character.
    merges = [(m[:at], m[at + 1 :]) for m in meta["tokenizer.ggml.merges"] if (at := m.find(" ", 1)) > 0]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    match pre:
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case _:
            split = pre_tokenizers.Split(Regex(LLAMA3 if pre == "llama-bpe" else QWEN2), "isolated")
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([split, to_bytes])


def _sentencepiece(meta: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise TokenizerError("the GGUF file holds no tokenizer.ggml.scores for its tokens; convert the model again")
    kinds = meta.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    unknown = tokens[int(meta.get("tokenizer.ggml.unknown_token_id", 0))]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges_from_scores({t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL})
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined piece scores best: as BPE merges, best piece first."""
    merges = []
    for piece, score in scores.items():
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in scores and right in scores]
        known.sort(key=lambda pair: (scores[pair[0]], scores[pair[1]]), reverse=True)
        merges += [(score, pair) for pair in known]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [pair for _, pair in merges]


def _add_special_tokens(tokenizer: Tokenizer, meta: Mapping[str, Any]) -> None:
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type")
    if kinds is None:
        named = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos")]
        kinds = [NORMAL] * len(tokens)
        for key in named:
            if key in meta:
                kinds[int(meta[key])] = CONTROL
    # Each call builds the search for added tokens anew, and Gemma has thousands of them.
    control, user_defined = ([AddedToken(token, normalized=False, special=which == CONTROL)
                              for token, kind in zip(tokens, kinds, strict=True) if kind == which]
                             for which in (CONTROL, USER_DEFINED))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _add_ends(tokenizer: Tokenizer, meta: Mapping[str, Any]) -> None:
    """Tokens put around a text when special tokens are asked for."""
    by_default = meta["tokenizer.ggml.model"] == "llama" or meta.get("tokenizer.ggml.pre") == "llama-bpe"
    ends: dict[str, tuple[str, int]] = {}
    for name, default in (("bos", by_default), ("eos", False)):
        index = meta.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and meta.get(f"tokenizer.ggml.add_{name}_token", default):
            ends[name] = (meta["tokenizer.ggml.tokens"][int(index)], int(index))
    if ends:
        before = [ends["bos"][0]] if "bos" in ends else []
        after = [ends["eos"][0]] if "eos" in ends else []
        single = [*before, "$A", *after]
        pair = [*single, *(f"{part}:1" for part in [*before, "$B", *after])]
        tokenizer.post_processor = processors.TemplateProcessing(single, pair, sorted(ends.values()))
