"""Pre-tokenizers for byte-level BPE, which split a text before tokens are merged, by their names in GGUF files.

A file names its pre-tokenizer instead of describing it. Names whose patterns are not known here are refused, because a
wrong one gives other tokens without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
SEED_CODER = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES)
DEEPSEEK_V3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
               r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
               r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    patterns: tuple[str, ...] = ()  # each cuts what those before it have left; without any, those of GPT-2 do
    digits: bool = False  # before GPT-2's patterns every digit is cut off
    ignore_merges: bool = False  # a piece that is a token is not merged from its bytes
    composes: bool = False  # characters are composed first (NFC)
    adds_bos: bool = False  # unless the file says otherwise

    def build(self) -> pre_tokenizers.PreTokenizer:
        cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        if self.digits:
            cuts.append(pre_tokenizers.Digits(individual_digits=True))
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        return pre_tokenizers.Sequence([*cuts, to_bytes])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composes else None


_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), PreTokenizer()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), PreTokenizer(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((LLAMA3,), ignore_merges=True)),
    "qwen2": PreTokenizer((QWEN2,), composes=True),
    "qwen35": PreTokenizer((QWEN35,), composes=True),
    "deepseek-r1-qwen": PreTokenizer((QWEN2,)),
    "deepseek-v3": PreTokenizer(DEEPSEEK_V3),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True),
    "seed-coder": PreTokenizer((SEED_CODER,)),
}
