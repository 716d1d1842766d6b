"""Teacher: what the target computes for a micro-batch of texts, as a drafter is taught it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch

from outrider.config import EngineConfig
from outrider.core import SamplingParams
from outrider.core.prompts import Prompt
from outrider.engine.assembly import engine_around
from outrider.layers import NothingAttends, StepContext
from outrider.llm import LLM
from outrider.models.base import Model
from outrider.runner.worker import Worker
from outrider.training.batches import MAX_MICRO_TEXTS
from outrider.training.recorder import TapRecorder
from outrider.training.texts import TrainingText
from outrider.training.vocabulary import DraftVocabulary

LOGIT_ROWS = 2048  # token rows whose logits over the whole vocabulary are held at once
CACHE_SHARE = 0.1  # of a GPU's memory, for the pages of the texts that are computed


@dataclass(frozen=True)
class TaughtTexts:
    """A micro-batch, padded to its longest text. On the target's device; nothing in it needs a gradient."""

    tokens: torch.Tensor  # [texts, length] int64; zeros behind a text's end
    lengths: torch.Tensor  # [texts]
    answer_from: torch.Tensor  # [texts]
    taps: torch.Tensor  # [texts, length, taps, hidden] residual streams of the target
    logits: torch.Tensor  # [texts, length, draft vocabulary] float32, the target's logits of the drafter's tokens
    best: torch.Tensor  # [texts, length] the target's likeliest next token, of its whole vocabulary

    def may_draft(self, num_drafts: int) -> torch.Tensor:
        """[texts, length] bool: tokens of which the next `num_drafts` tokens are known and belong to the answer. After
        the first token of a text nothing is drafted: there is no hidden state before it."""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (at >= (self.answer_from[:, None] - 1).clamp_min(1)) & (at + num_drafts < self.lengths[:, None])


class Teacher:
    """An engine around the target that computes texts and keeps their hidden states."""

    def __init__(self, config: EngineConfig, model: Model, taps: tuple[int, ...], vocabulary: DraftVocabulary, *,
                 max_text_tokens: int, micro_tokens: int) -> None:
        self._model, self._taps = model, taps
        self._ids = vocabulary.ids.to(model.device)
        self._recorder = TapRecorder(taps, model.hidden_size, model.dtype)
        config = replace(config.without_drafts(), enable_prefix_caching=False, enforce_eager=True,
                         max_model_len=max_text_tokens + 1, max_num_batched_tokens=micro_tokens, max_step_ms=None,
                         max_num_seqs=min(MAX_MICRO_TEXTS, micro_tokens),
                         gpu_memory_utilization=_memory_share(config, model.device))
        self._llm = LLM.around(engine_around(config, Worker(config, model, drafter=self._recorder)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._llm.close()

    @torch.no_grad()
    def teach(self, texts: Sequence[TrainingText]) -> TaughtTexts:
        starts = self._record([text.tokens for text in texts])
        device, length = self._model.device, max(len(text.tokens) for text in texts)
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        place = torch.zeros(len(texts), length, dtype=torch.int64)  # of each token in the recording; any for padding
        for row, text in enumerate(texts):
            end = len(text.tokens)
            tokens[row, :end] = torch.tensor(text.tokens)
            place[row, :end] = torch.arange(end) + starts[text.tokens]
        # Indexing copies: recorded tensors belong to the engine, and autograd may not keep them.
        states = self._recorder.states[place.to(device)]
        taps, final = states.split([states.shape[-1] - self._model.hidden_size, self._model.hidden_size], dim=-1)
        logits, best = self._logits(final.flatten(0, 1))
        return TaughtTexts(
            tokens.to(device), torch.tensor([len(text.tokens) for text in texts], device=device),
            torch.tensor([text.answer_from for text in texts], device=device),
            taps.unflatten(-1, (len(self._taps), self._model.hidden_size)), logits.view(*place.shape, -1),
            best.view(place.shape),
        )

    def _record(self, texts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Let the engine compute the texts. Returns where the states of each begin."""
        starts = self._recorder.expect(texts)
        self._wait()  # steps run on a stream of their own
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        prompts: list[Prompt] = [list(text) for text in starts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        errors = [output.outputs[0].error for output in outputs if output.outputs[0].finish_reason == "error"]
        if errors:
            raise RuntimeError(f"the target cannot compute {len(errors)} of {len(outputs)} texts: {errors[0]}")
        self._wait()  # a result is back before the recorder's part of the step has run
        if not bool(self._recorder.is_written[: sum(len(text) for text in starts)].all()):
            raise RuntimeError("the engine did not record the hidden states of all texts; the log may say why")
        return starts

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _logits(self, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the drafter's tokens, and the likeliest of all tokens. final: [tokens, hidden]"""
        parts = []
        for rows in final.split(LOGIT_ROWS):
            context = StepContext(NothingAttends(), torch.zeros(len(rows), dtype=torch.int64, device=rows.device))
            logits = self._model.logits(rows, context)
            parts.append((logits[:, self._ids].float(), logits.argmax(dim=-1)))
        return torch.cat([own for own, _ in parts]), torch.cat([best for _, best in parts])


def _memory_share(config: EngineConfig, device: torch.device) -> float:
    """On a GPU: what is in use and a small part for pages, since training needs the rest. On a CPU pages take memory
    when they are first written."""
    if device.type != "cuda":
        return config.gpu_memory_utilization
    free, total = torch.cuda.mem_get_info(device)
    return min(config.gpu_memory_utilization, (total - free) / total + CACHE_SHARE)
