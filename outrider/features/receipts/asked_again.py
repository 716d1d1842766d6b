"""Reads the request and the engine's settings from a receipt, so that its tokens can be computed again."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from outrider.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt
from outrider.core.structured import StructuredOutputsParams
from outrider.features.receipts.receipt import Receipt, faults
from outrider.features.receipts.writer import SETTINGS

MATE_TOKENS = 48  # most of the prompt of a random batch mate


def engine_settings(receipt: Receipt, key: bytes | None = None, *, given: Collection[str] = ()) -> dict[str, Any]:
    """The engine settings with which a receipt's tokens can be computed again. Raises ValueError for a setting that no
    receipt has. Logits processors are code that the engine would import, so they are refused unless `key` has signed
    the receipt. given: names of settings that the caller sets; the receipt's values for them are left out."""
    told = {name: value for name, value in receipt["settings"].items() if name not in given}
    odd = next((name for name in told if name not in SETTINGS), None)
    if odd is not None:
        raise ValueError(f"settings.{odd}: this version of outrider has no such setting in receipts: replay it with "
                         "the version that made it")
    if told.get("logits_processors") and (key is None or faults(receipt, key)):
        raise ValueError("settings.logits_processors: the receipt names code to run: confirm its signature with "
                         "--receipt-key-file, or give the same names as --logits-processors")
    known = EngineConfig.__dataclass_fields__
    settings = {name: tuple(value) if isinstance(known[name].default, tuple) else value
                for name, value in told.items()}
    return settings | {"exact": receipt["exact"]}


def prompt_of(receipt: Receipt) -> Prompt:
    return {"prompt_token_ids": receipt["prompt_token_ids"], "bidirectional_spans": receipt["bidirectional_spans"]}


def params_of(receipt: Receipt) -> SamplingParams:
    """The sampling parameters of the receipt's request. Raises ValueError for a parameter that is unknown here."""
    given = dict(receipt["params"])
    if isinstance(given.get("structured_outputs"), dict):
        given["structured_outputs"] = StructuredOutputsParams.from_fields(given["structured_outputs"])
    if isinstance(given.get("bad_words_token_ids"), list):
        given["bad_words_token_ids"] = tuple(map(tuple, given["bad_words_token_ids"]))
    return SamplingParams.from_optional(**given)


def num_tokens(receipt: Receipt) -> int:
    """The most tokens that the receipt's request can have, prompt and answer together."""
    return len(receipt["prompt_token_ids"]) + int(receipt["params"]["max_tokens"])


def random_mates(count: int, vocab_size: int, max_len: int, seed: int) -> list[tuple[Prompt, SamplingParams]]:
    """Make random requests that run in the same batches as the receipt's request when it is replayed."""
    draw = random.Random(seed)
    mates: list[tuple[Prompt, SamplingParams]] = []
    for _ in range(count):
        length = draw.randint(1, max(1, min(MATE_TOKENS, max_len // 2)))
        params = SamplingParams(temperature=draw.choice((0.0, 0.7, 1.0)), top_p=draw.choice((0.9, 1.0)),
                                seed=draw.randrange(1 << 30), max_tokens=max(1, max_len - length), ignore_eos=True,
                                detokenize=False)
        mates.append(([draw.randrange(vocab_size) for _ in range(length)], params))
    return mates
