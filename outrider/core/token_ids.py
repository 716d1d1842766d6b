"""Checks that the token ids in a request's parameters are in the vocabulary, and that stop ids are not too many. No
torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from outrider.core.fields import shown
from outrider.core.limits import Limits
from outrider.core.params import SamplingParams

KEY = re.compile("[0-9]{1,10}")


def bias_from_json(bias: Mapping[str, float]) -> dict[int, float]:
    """Convert a `logit_bias` from JSON, where token ids are texts. Only decimal digits are accepted: int() would also
    take ' 5_0 ' and digits of other scripts."""
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not KEY.fullmatch(key):
            raise ValueError(f"logit_bias: the key {shown(key)} is not a token id: write its decimal digits, as \"42\"")
        if int(key) in found:
            raise ValueError(f"logit_bias: the key {shown(key)} names the same token as another key: leave one out")
        found[int(key)] = value
    return found


def check_token_ids(params: SamplingParams, limits: Limits) -> None:
    """Raise ValueError if the stop ids, biases, allowed ids or bad words contain a token that is not in the vocabulary.
    Called before a request is admitted."""
    bad_word_ids = [token for word in params.bad_words_token_ids for token in word]
    named: dict[str, Collection[int]] = {
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": bad_word_ids,
    }
    for name, ids in named.items():
        _check_vocabulary(name, ids, limits)
    if any(not word for word in params.bad_words_token_ids):
        raise ValueError("bad_words: one of the words has no tokens (it is empty): leave it out")


def check_stop_ids(stop_ids: Collection[int], limits: Limits) -> None:
    """Raise ValueError if there are more stop ids than the device can hold, or one outside the vocabulary. stop_ids:
    those of the request and of the model together."""
    if len(stop_ids) > limits.max_stop_ids:
        raise ValueError(f"there are {len(stop_ids)} stop token ids, those of the model included, and a request may "
                         f"have at most {limits.max_stop_ids}: give fewer stop_token_ids")
    _check_vocabulary("stop_token_ids", stop_ids, limits)


def _check_vocabulary(name: str, ids: Collection[int], limits: Limits) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        token = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise ValueError(f"{name}: token id {token} is outside the vocabulary of {limits.vocab_size} tokens: give ids "
                         f"from 0 to {limits.vocab_size - 1}")
