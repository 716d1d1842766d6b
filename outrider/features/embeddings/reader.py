"""EmbedsReader: reads the embeddings that a prompt gives in place of token ids. It reads torch tensors without
importing torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.fields import shown
from outrider.core.hidden_params import RequestParams
from outrider.core.params import SamplingParams
from outrider.engine.input_reader import InputReader
from outrider.engine.served_model import ServedModel
from outrider.features.embeddings.part import PromptEmbeds


class EmbedsReader(InputReader):
    def __init__(self, prompt: Mapping[str, Any], params: RequestParams, model: ServedModel) -> None:
        embeds, self._positions = prompt.get("prompt_embeds"), prompt.get("prompt_embeds_positions")
        has_text, has_own_ids = (prompt.get(key) is not None for key in ("prompt", "prompt_token_ids"))
        if embeds is not None:
            self._values = read_embeds(embeds, model.limits.hidden_size)
        if self._positions is not None and (embeds is None or not (has_text or has_own_ids)):
            raise ValueError("prompt_embeds_positions says where prompt_embeds stand among the tokens of 'prompt' "
                             "or 'prompt_token_ids': give both too")
        self.has_ids = has_own_ids or self._positions is not None
        if not self.has_ids:
            refuse_id_readers(params)

    def token_ids(self, own: Callable[[], Sequence[int]]) -> Sequence[int]:
        return own() if self.has_ids else [0] * len(self._values)

    def make_parts(self, token_ids: Sequence[int]) -> list[PromptEmbeds]:
        return [place_embeds(self._values, self._positions, len(token_ids))]


def read_embeds(given: Any, hidden_size: int) -> NDArray[np.floating]:
    """Copy an array or a tensor [tokens, hidden size] of finite floats. Raises ValueError for anything else."""
    if hasattr(given, "is_floating_point"):  # a torch tensor: numpy knows neither its device nor bfloat16
        is_narrow = given.is_floating_point() and given.element_size() <= 2
        given = (given.detach().float() if is_narrow else given.detach()).cpu().numpy()
    if not isinstance(given, np.ndarray):
        raise ValueError(f"prompt_embeds must be a numpy array or a torch tensor, got {shown(given)}")
    if given.ndim != 2 or given.shape[1] != hidden_size or given.dtype.kind != "f":
        raise ValueError(f"prompt_embeds must be floats of shape [tokens, {hidden_size}], got {given.dtype} of shape "
                         f"{list(given.shape)}")
    values: NDArray[np.floating] = given.astype(np.float64 if given.dtype == np.float64 else np.float32, order="C")
    if not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise ValueError("prompt_embeds must be finite in float32, and hold NaN, infinity or larger numbers")
    return values


def place_embeds(values: NDArray[np.floating], given: Sequence[Any] | None, num_tokens: int) -> PromptEmbeds:
    """Check the positions of a prompt's embeddings. given: the positions in a prompt of `num_tokens` tokens; None if
    there is an embedding for every token."""
    if given is None and len(values) != num_tokens:
        raise ValueError(f"prompt_embeds has {len(values)} tokens and prompt_token_ids has {num_tokens}: give as many "
                         "of both, or prompt_embeds_positions")
    places = range(num_tokens) if given is None else given
    are_integers = bool(places) and all(type(position) is int for position in places)
    if not are_integers or sorted({*places} & {*range(num_tokens)}) != [*places]:
        raise ValueError(f"prompt_embeds_positions must be rising positions from 0 to {num_tokens - 1} (the prompt has "
                         f"{num_tokens} tokens), got {shown(given)}")
    if len(places) != len(values):
        raise ValueError(f"prompt_embeds has {len(values)} embeddings and prompt_embeds_positions has {len(places)}: "
                         "give one position for each embedding")
    positions = np.array(places, dtype=np.int64)
    digest = hashlib.blake2b(f"{values.dtype} {values.shape} ".encode(), digest_size=16)
    digest.update(values.data)
    digest.update(positions.data)
    return PromptEmbeds(values, positions, digest.hexdigest())


def refuse_id_readers(params: RequestParams) -> None:
    """Raise ValueError for sampling parameters that need the token ids of the prompt, because embeddings have none."""
    if not isinstance(params, SamplingParams):
        return
    reads = {"prompt_logprobs": params.prompt_logprobs is not None, "bad_words": bool(params.bad_words_token_ids),
             "repetition_penalty": params.repetition_penalty != 1}
    for name in (name for name, is_given in reads.items() if is_given):
        raise ValueError(f"{name} reads the token ids of the prompt: give prompt_token_ids beside prompt_embeds")
