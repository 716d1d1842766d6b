"""Teacher: computes the target's outputs for a micro-batch of texts, which a drafter is trained to match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch

from outrider.config import EngineConfig
from outrider.core import SamplingParams
from outrider.core.prompts import Prompt
from outrider.engine.assembly import engine_around
from outrider.kernels.buffers import send
from outrider.llm import LLM
from outrider.models.base import Model
from outrider.runner.worker import Worker
from outrider.training.batches import MAX_MICRO_TEXTS
from outrider.training.draft_logits import DraftLogits
from outrider.training.recorder import AuxRecorder
from outrider.training.text_states import (
    SEGMENT_BYTES,
    KeepProgress,
    StateRoom,
    TextStates,
    Tokens,
    segments,
    to_pinned,
)
from outrider.training.texts import TrainingText
from outrider.training.vocabulary import DraftVocabulary

CACHE_SHARE = 0.1  # of a GPU's memory, for the pages of the texts that are computed
GPU_STEP_TOKENS = 32768  # most tokens of the target's steps on a GPU, where large steps are faster
MAX_STEP_MICRO_BATCHES = 4  # a step computes no more micro-batches: a low `micro_tokens` means that memory is short


@dataclass(frozen=True)
class TaughtTexts:
    """A micro-batch of texts with the target's outputs, padded to its longest text. Data that decides at which places
    the drafter learns is on the host, so that no step waits for the device. The rest is on the target's device, and
    nothing in it needs a gradient."""

    tokens: torch.Tensor  # [texts, length] int64; zeros behind a text's end
    aux_states: torch.Tensor  # [texts, length, layers, hidden] residual streams of the target
    logits: torch.Tensor  # [places, draft vocabulary] float32, the target's logits of the drafter's tokens
    # On the host:
    place_of: torch.Tensor  # [texts, length] the row of `logits` with a token's logits, for those of `may_draft(1)`
    best: torch.Tensor  # [texts, length] the target's likeliest next token, of its whole vocabulary, in the answer
    lengths: torch.Tensor  # [texts]
    answer_from: torch.Tensor  # [texts]

    def may_draft(self, num_drafts: int) -> torch.Tensor:
        """[texts, length] bool on the host: whether the next `num_drafts` tokens after a token are known and belong to
        the answer."""
        return may_draft(self.lengths, self.answer_from, self.tokens.shape[1], num_drafts)


def may_draft(lengths: torch.Tensor, answer_from: torch.Tensor, width: int, num_drafts: int) -> torch.Tensor:
    """Return [texts, length] bool on the host: whether the next `num_drafts` tokens after a token are known and belong
    to the answer. False at the first token of a text, because there is no hidden state before it."""
    at = torch.arange(width)
    return (at >= (answer_from[:, None] - 1).clamp_min(1)) & (at + num_drafts < lengths[:, None])


class Teacher:
    """An engine around the target, which computes texts. It keeps the hidden states of as many texts as fit into
    memory."""

    def __init__(self, config: EngineConfig, model: Model, aux_layers: tuple[int, ...], vocabulary: DraftVocabulary, *,
                 max_text_tokens: int, micro_tokens: int) -> None:
        self._model, self._aux_layers = model, aux_layers
        self._logits = DraftLogits(model, vocabulary.ids.to(model.device))
        self._recorder = AuxRecorder(aux_layers, model.hidden_size, model.dtype)
        self._kept: dict[Tokens, TextStates] = {}
        step_tokens = micro_tokens
        if model.device.type == "cuda":
            step_tokens = max(micro_tokens, min(GPU_STEP_TOKENS, MAX_STEP_MICRO_BATCHES * micro_tokens))
        self._step_tokens = step_tokens
        config = replace(config.without_drafts(), enable_prefix_caching=False, enforce_eager=True,
                         max_model_len=max_text_tokens + 1, max_num_batched_tokens=step_tokens, max_step_ms=None,
                         max_num_seqs=min(MAX_MICRO_TEXTS, micro_tokens),
                         gpu_memory_utilization=_memory_share(config, model.device))
        self._llm = LLM.around(engine_around(config, Worker(config, model, drafter=self._recorder)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._llm.close()

    @torch.no_grad()
    def keep(self, texts: Sequence[TrainingText], report: Callable[[str], None]) -> None:
        """Compute texts, and keep their hidden states until memory is full, in the order of the texts."""
        missing = {tokens: start for tokens, start in _answers(texts).items() if tokens not in self._kept}
        room = StateRoom.measure(self._model.device)
        progress = KeepProgress(sum(map(len, missing)), room, report)
        for group in segments(missing, *self._segment_limits(len(missing))):
            if not self._keep_segment(group, room):
                break
            progress.add(sum(map(len, group)))
        progress.end(room)

    def _segment_limits(self, num_texts: int) -> tuple[int, int]:
        """The most tokens and texts that are computed in one go (a segment). On a CPU a segment must fit into one
        engine step: if a resumed run split a segment differently over steps, the last bits of its states might
        differ."""
        if self._model.device.type == "cpu":
            return self._step_tokens, MAX_MICRO_TEXTS
        return SEGMENT_BYTES // self._recorder.row_bytes, num_texts

    def _keep_segment(self, group: Mapping[Tokens, int], room: StateRoom) -> bool:
        """Compute a segment's texts and keep their states on the device, or else on the host. Returns False, and
        computes nothing, if neither has enough free memory."""
        num_bytes = (sum(map(len, group)) + 1) * self._recorder.row_bytes
        is_on_device = room.take_on_device(num_bytes)
        if not is_on_device and not room.take_on_host(num_bytes):
            return False
        found = self._compute(group)
        self._kept |= found if is_on_device else _on_host(found)
        return True

    @torch.no_grad()
    def teach(self, texts: Sequence[TrainingText]) -> TaughtTexts:
        missing = {tokens: start for tokens, start in _answers(texts).items() if tokens not in self._kept}
        computed = self._compute(missing) if missing else {}
        device, length = self._model.device, max(len(text.tokens) for text in texts)
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        best = torch.zeros(len(texts), length, dtype=torch.int64)
        states = torch.zeros(len(texts), length, self._recorder.width, dtype=self._recorder.dtype, device=device)
        for row, text in enumerate(texts):
            end, own = len(text.tokens), self._kept.get(text.tokens) or computed[text.tokens]
            tokens[row, :end] = torch.tensor(text.tokens)
            best[row, :end] = own.best
            states[row, :end].copy_(own.states, non_blocking=True)
        lengths = torch.tensor([len(text.tokens) for text in texts])
        answer_from = torch.tensor([text.answer_from for text in texts])
        is_place = may_draft(lengths, answer_from, length, 1).flatten()
        aux_states, final = states[..., : -self._model.hidden_size], states.flatten(0, 1)[:, -self._model.hidden_size :]
        places = send(is_place.nonzero()[:, 0], device)
        return TaughtTexts(
            send(tokens, device), aux_states.unflatten(-1, (len(self._aux_layers), self._model.hidden_size)),
            self._logits(final[places]), (is_place.cumsum(0) - 1).view(tokens.shape), best, lengths,
            answer_from,
        )

    def _compute(self, answer_from: Mapping[Tokens, int]) -> dict[Tokens, TextStates]:
        """Let the engine compute the texts. answer_from: the texts, each with the place where its answer begins."""
        recording = self._recorder.recording(sum(map(len, answer_from)))
        starts = self._recorder.expect(list(answer_from), recording)
        self._wait()  # steps run on a stream of their own
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        prompts: list[Prompt] = [list(tokens) for tokens in starts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        errors = [output.outputs[0].error for output in outputs if output.outputs[0].finish_reason == "error"]
        if errors:
            raise RuntimeError(f"the target cannot compute {len(errors)} of {len(outputs)} texts: {errors[0]}")
        self._wait()  # a result is back before the recorder's part of the step has run
        if not self._recorder.has_recorded_all():
            raise RuntimeError("the engine did not record the hidden states of all texts; the engine's log may say why")
        is_answer = torch.zeros(len(recording), dtype=torch.bool)
        for tokens, start in starts.items():
            is_answer[start + answer_from[tokens] - 1 : start + len(tokens) - 1] = True
        rows = is_answer.nonzero()[:, 0]
        final = recording[:, -self._model.hidden_size :]
        best = torch.zeros(len(recording), dtype=torch.int64)
        for part in rows.split(self._step_tokens):
            best[part] = self._logits.best(final[part.to(final.device)]).cpu()
        return {tokens: TextStates(recording[start : start + len(tokens)], best[start : start + len(tokens)])
                for tokens, start in starts.items()}

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def _answers(texts: Sequence[TrainingText]) -> dict[Tokens, int]:
    """The place where each text's answer begins, in the texts' order. If a text occurs with two prompts, it is the
    earlier place."""
    starts: dict[Tokens, int] = {}
    for text in texts:
        starts[text.tokens] = min(text.answer_from, starts.get(text.tokens, text.answer_from))
    return starts


def _on_host(found: dict[Tokens, TextStates]) -> dict[Tokens, TextStates]:
    """Copy the states of the texts of one recording to the host's memory."""
    moved = to_pinned(torch.cat([own.states for own in found.values()]))
    parts = moved.split([len(tokens) for tokens in found])
    return {tokens: TextStates(part, own.best) for (tokens, own), part in zip(found.items(), parts, strict=True)}


def _memory_share(config: EngineConfig, device: torch.device) -> float:
    """The share of the device's memory that the engine may use. On a GPU it is the memory in use now and a small part
    for pages, since training needs the rest. On a CPU pages take memory only when they are first written."""
    if device.type != "cuda":
        return config.gpu_memory_utilization
    free, total = torch.cuda.mem_get_info(device)
    return min(config.gpu_memory_utilization, (total - free) / total + CACHE_SHARE)
