"""SpansReader: reads the spans that a prompt marks. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.hidden_params import RequestParams
from outrider.engine.input_reader import InputReader
from outrider.engine.served_model import ServedModel
from outrider.features.spans.part import PromptSpans


class SpansReader(InputReader):
    def __init__(self, prompt: Mapping[str, Any], params: RequestParams, model: ServedModel) -> None:
        self._given, self._model = prompt["bidirectional_spans"], model

    def make_parts(self, token_ids: Sequence[int]) -> list[PromptSpans]:
        if not self._given:
            return []
        if not self._model.takes_extra_keys:
            raise ValueError("bidirectional_spans are not served by this engine: start it with "
                             "attention_backend='flex' (or 'torch'), for a model whose layers are all attention")
        return [check_spans(self._given, len(token_ids), self._model.longest_range)]


def check_spans(given: object, prompt_len: int, most: int) -> PromptSpans:
    """Make the spans of a prompt. Raises ValueError if they are not valid."""
    name = "bidirectional_spans"
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"{name} must be a list of [start, end] pairs, got {type(given).__name__}")
    spans = []
    for item in given:
        if not (isinstance(item, (list, tuple)) and len(item) == 2 and all(type(end) is int for end in item)):
            raise ValueError(f"{name} must be a list of [start, end] pairs of integers, got {item!r}")
        start, end = item
        if not 0 <= start < end <= prompt_len:
            raise ValueError(f"{name}: [{start}, {end}] is not a span of this prompt: it must have 0 <= start < end <= "
                             f"{prompt_len}, the number of the prompt's tokens")
        if end - start > most:
            raise ValueError(f"{name}: [{start}, {end}] has {end - start} tokens, and a step has room for a span of at "
                             f"most {max(0, most)}: raise max_num_batched_tokens or lower max_num_seqs")
        spans.append((start, end))
    spans.sort()
    for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise ValueError(f"{name}: two spans overlap at position {start}: join them, or leave one out")
    return PromptSpans(tuple(spans))
