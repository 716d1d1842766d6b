"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE, SentencePiece-style BPE, or WordPiece.

It reads no files: the caller gives the metadata. Unknown kinds of tokenizer are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from outrider.core.fields import check_value, shown
from outrider.engine.gguf_pre_tokenizers import PRE_TOKENIZERS

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
SPACE = "▁"  # what SentencePiece writes for a space


# The lists of a tokenizer and what their values must be. Ids of tokens have names that end alike.
LISTS: dict[str, Any] = {"tokens": list[str], "merges": list[str], "scores": list[Any], "token_type": list[int]}
TOKEN_ID = "_token_id"


class TokenizerError(ValueError):
    """Raised if tokenizer files are missing, damaged or of a kind that is not supported."""


def build_gguf_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    kind = meta.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in meta:
        raise TokenizerError("the GGUF file holds no tokenizer (tokenizer.ggml.model, tokenizer.ggml.tokens); "
                             "convert the model again with its tokenizer, or use its safetensors folder")
    _check_types(meta)
    try:
        match kind:
            case "gpt2":
                tokenizer = _byte_level(meta)
            case "llama":
                tokenizer = _sentencepiece(meta, _merges_of_scores(meta))
            case "gemma4":
                tokenizer = _sentencepiece(meta, _stored_merges(meta))
            case "bert":
                tokenizer = _wordpiece(meta)
            case _:
                raise TokenizerError(f"tokenizer.ggml.model = {shown(kind)} is not supported; supported: gpt2, llama, "
                                     "gemma4, bert. Use the model's safetensors folder instead")
        _add_special_tokens(tokenizer, meta)
        _add_ends(tokenizer, meta)
    except TokenizerError:
        raise
    except Exception as error:  # ids beyond the tokens, values of other types; the library raises bare Exceptions
        raise TokenizerError(f"the tokenizer of the GGUF file is damaged ({shown(str(error))}); fetch the file again, "
                             "or convert the model again") from error
    return tokenizer


def _check_types(meta: Mapping[str, Any]) -> None:
    """Raise an error that names the metadata keys whose values have a wrong type."""
    expected: dict[str, Any] = {f"tokenizer.ggml.{name}": kind for name, kind in LISTS.items()}
    expected |= {key: int for key in meta if key.startswith("tokenizer.ggml.") and key.endswith(TOKEN_ID)}
    for key in expected.keys() & meta.keys():
        try:
            check_value(key, expected[key], meta[key])
        except ValueError as error:
            raise TokenizerError(f"the tokenizer of the GGUF file is damaged: {error}; fetch the file again, or "
                                 "convert the model again") from None


def _byte_level(meta: Mapping[str, Any]) -> Tokenizer:
    pre = meta.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre = {shown(pre)} is not supported; supported: "
                             f"{', '.join(PRE_TOKENIZERS)}. Use the model's safetensors folder instead")
    known = PRE_TOKENIZERS[pre]
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(BPE(vocab, _stored_merges(meta), ignore_merges=known.ignore_merges))
    tokenizer.pre_tokenizer = known.build()
    if (normalizer := known.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "tokenizer.ggml.merges" not in meta:
        raise TokenizerError("the GGUF file holds no tokenizer.ggml.merges; convert the model again, or use its "
                             "safetensors folder")
    # A token may itself begin with a space, so the space that parts the two is looked for after the first character.
    return [(m[:at], m[at + 1 :]) for m in meta["tokenizer.ggml.merges"] if (at := m.find(" ", 1)) > 0]


def _sentencepiece(meta: Mapping[str, Any], merges: list[tuple[str, str]]) -> Tokenizer:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    unknown = tokens[int(meta.get("tokenizer.ggml.unknown_token_id", 0))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _wordpiece(meta: Mapping[str, Any]) -> Tokenizer:
    """Build a WordPiece tokenizer. GGUF files mark the first piece of a word, and BERT's own files mark all other
    pieces."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.token_type")
    vocab = {}
    for i, token in enumerate(tokens):
        is_word = token.startswith(SPACE) and len(token) > 1
        is_control = kinds is not None and kinds[i] == CONTROL
        vocab[token if is_control else token[1:] if is_word else f"##{token}"] = i
    unknown = tokens[int(meta.get("tokenizer.ggml.unknown_token_id", 100))]
    tokenizer = Tokenizer(WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    lowercase = bool(meta.get("tokenizer.ggml.normalizer.lowercase", True))
    strips = bool(meta.get("tokenizer.ggml.normalizer.strip_accents", lowercase))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _merges_of_scores(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens, scores = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise TokenizerError("the GGUF file has no score for each of its tokens (tokenizer.ggml.scores); convert the "
                             "model again, or use its safetensors folder")
    kinds = meta.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    return _merges_from_scores({t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL})


def _merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Make the BPE merges that equal a SentencePiece model. Such a model joins the neighbours whose joined piece has
    the best score, and BPE does the same if its merges are sorted by score."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        known = [(left, right) for i in range(1, len(piece))
                 if (left := piece[:i]) in scores and (right := piece[i:]) in scores]
        if len(known) > 1:  # a million halves of Gemma's pieces are looked at, half of which are alone
            known.sort(key=lambda pair: (scores[pair[0]], scores[pair[1]]), reverse=True)
        merges += known
    return merges


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
    """Set the tokens that are put before and after a text when special tokens are asked for."""
    kind, pre = meta["tokenizer.ggml.model"], PRE_TOKENIZERS.get(meta.get("tokenizer.ggml.pre", ""))
    is_wordpiece = kind == "bert"
    adds_bos = kind in ("llama", "gemma4") or is_wordpiece or (kind == "gpt2" and pre is not None and pre.adds_bos)
    ends: dict[str, tuple[str, int]] = {}
    for end, default, keys in (("bos", adds_bos, ("bos", "cls")), ("eos", is_wordpiece, ("seperator", "eos"))):
        found = (meta.get(f"tokenizer.ggml.{key}_token_id") for key in (keys if is_wordpiece else (end,)))
        index = next((own for own in found if own is not None), None)
        said = "sep" if is_wordpiece and end == "eos" else end
        if index is not None and meta.get(f"tokenizer.ggml.add_{said}_token", default):
            ends[end] = (meta["tokenizer.ggml.tokens"][int(index)], int(index))
    if ends:
        before = [ends["bos"][0]] if "bos" in ends else []
        after = [ends["eos"][0]] if "eos" in ends else []
        single = [*before, "$A", *after]
        pair = [*single, *(f"{part}:1" for part in [*before, "$B", *after])]
        tokenizer.post_processor = processors.TemplateProcessing(single, pair, sorted(set(ends.values())))
