"""Trainer: the loop of training steps, with evaluations, checkpoints and the decision to stop early."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from outrider.training.batches import BatchPlan, micro_batches
from outrider.training.checkpoint import Evaluation, TrainingCheckpoint
from outrider.training.loss import HeldOutAcceptance, held_out_acceptance, pass_weights, text_loss
from outrider.training.optimizer import DrafterOptimizer
from outrider.training.settings import TrainingSettings
from outrider.training.teacher import Teacher
from outrider.training.texts import SplitTexts
from outrider.training.trainee import Trainee
from outrider.training.vocabulary import DraftVocabulary
from outrider.training.workspace import Workspace

LEAST_GAIN = 0.005  # of the mean run, to count as better
LEAST_RUN = 1.1  # a run with a smaller mean run is still at its beginning, and has not stalled
REPORT_SECONDS = 5.0
MAX_UNSETTLED = 16  # steps whose losses have not been read: reading one waits for the device
FEW_STEPS = 50  # the heads of tests need about 100; with fewer steps than this one accepts next to nothing


class Trainer:
    def __init__(self, trainee: Trainee, teacher: Teacher, texts: SplitTexts, vocabulary: DraftVocabulary,
                 settings: TrainingSettings, workspace: Workspace, *, device: torch.device, peak_rate: float,
                 report: Callable[[str], None]) -> None:
        self._trainee, self._teacher, self._texts, self._settings = trainee, teacher, texts, settings
        self._workspace, self._device, self._report = workspace, device, report
        self._micro_tokens = settings.micro_tokens_on(device.type)
        self._plan = BatchPlan(tuple(len(text.tokens) for text in texts.training), settings.batch_tokens,
                               self._micro_tokens, settings.epochs, settings.seed)
        self._optimizer = DrafterOptimizer(trainee.weights, settings, peak_rate=peak_rate,
                                           num_steps=self._plan.num_steps)
        self._is_known, self._ids = vocabulary.is_known, vocabulary.ids.to(device)
        self._pass_weights = pass_weights(settings.passes, settings.pass_decay)
        self._every = max(1, self._plan.num_steps // settings.evaluations)
        # The state of the run. The optimizer's moments stay with the optimizer until a checkpoint is written.
        self._state = TrainingCheckpoint(0, trainee.weights, {}, {})
        self._unsettled: list[torch.Tensor] = []  # [loss, norm of the gradient] of the last steps, on the device

    @property
    def evaluations(self) -> list[Evaluation]:
        return self._state.evaluations

    @property
    def best(self) -> Evaluation:
        """The evaluation with the most tokens per step (mean run). Among equal ones it is the last, because its loss is
        lower."""
        return max(reversed(self.evaluations), key=lambda evaluation: evaluation.acceptance.mean_run)

    @property
    def num_steps_done(self) -> int:
        return self._state.step

    def resume(self, saved: TrainingCheckpoint) -> None:
        shapes, own = ({name: tensor.shape for name, tensor in weights.items()}
                       for weights in (saved.weights, self._trainee.weights))
        if shapes != own:
            raise ValueError("--resume: the checkpoint in the folder is of another drafter: delete "
                             "training/checkpoint.safetensors, and training begins anew with the same texts")
        self._trainee.load(saved.weights)
        if saved.moments:
            self._optimizer.load(saved.moments, saved.step)
        self._state = replace(saved, weights=self._trainee.weights, moments={})
        self._report(f"resumed after step {saved.step} of {self._plan.num_steps}")

    def run(self) -> None:
        """Train to the end or until acceptance no longer grows; the best weights are the trainee's afterwards."""
        self._report(f"training {self._trainee.num_parameters / 1e6:.2f}M parameters on "
                     f"{len(self._texts.training)} texts of {sum(self._plan.lengths)} tokens, "
                     f"{self._plan.num_steps} steps; {len(self._texts.held_out)} texts held out")
        if self._state.step < self._plan.num_steps and not self._has_stalled():
            self._teacher.keep([*self._texts.held_out, *self._texts.training], self._report)
        if self._plan.num_steps < FEW_STEPS:
            self._report(f"{self._plan.num_steps} steps are few to learn from: a lower --batch-tokens makes more steps "
                         "of the same texts")
        last_saved = last_told = time.perf_counter()
        num_tokens = 0  # since the last line
        while self._state.step < self._plan.num_steps and not self._has_stalled():
            self._train_step(self._state.step)
            done = self._state.step
            num_tokens += sum(self._plan.lengths[index] for index in self._plan.texts_of(done - 1))
            if time.perf_counter() - last_told >= REPORT_SECONDS or done == self._plan.num_steps:
                loss = self._settle()
                now = time.perf_counter()
                self._report(f"step {done} of {self._plan.num_steps}: loss {loss:.3f}, rate "
                             f"{self._optimizer.rate(done - 1):.1e}, {num_tokens / (now - last_told):.0f} tokens/s")
                last_told, num_tokens = now, 0
            if done % self._every == 0 or done == self._plan.num_steps:
                began = time.perf_counter()
                self._evaluate()
                last_told += time.perf_counter() - began  # the speed of steps is told without it
            if time.perf_counter() - last_saved >= self._settings.save_seconds:
                self._save()
                last_saved = time.perf_counter()
        if not self._state.evaluations:
            self._evaluate()
        self._save()
        self._trainee.load(self._state.best)

    def _train_step(self, step: int) -> None:
        """Launch a training step on the device. `_settle` reads its loss later, so that the host does not wait for each
        step."""
        groups = self._plan.micro_batches(step)
        num_texts, total = sum(map(len, groups)), torch.zeros((), device=self._device)
        self._optimizer.zero_gradients()
        for group in groups:
            taught = self._teacher.teach([self._texts.training[index] for index in group])
            with self._trainee.with_gradients():
                with self._arithmetic():
                    loss = text_loss(self._trainee, taught, self._is_known, self._pass_weights, num_texts)
                if loss.requires_grad:  # else no place of these texts can be learned from
                    loss.backward()
            total = total + loss.detach()
        norm = self._optimizer.apply(step)
        self._unsettled.append(torch.stack((total.double(), norm.double())))
        self._state = replace(self._state, step=step + 1)
        if len(self._unsettled) == MAX_UNSETTLED:
            self._settle()

    def _settle(self) -> float:
        """Read the losses of the launched steps. Returns the last one. Raises RuntimeError for a step whose loss or
        gradient is not finite. The checkpoint is written after this call, so it never contains the result of such a
        step."""
        if self._unsettled:
            first = self._state.step - len(self._unsettled)
            read = torch.stack(self._unsettled).tolist()
            self._unsettled = []
            for step, (loss, norm) in enumerate(read, start=first):
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    raise RuntimeError(f"step {step + 1}: the loss is {loss} and the gradient's norm {norm}; lower "
                                       "--learning-rate")
            self._state = replace(self._state, losses=[*self._state.losses, *(loss for loss, _ in read)])
        return self._state.losses[-1] if self._state.losses else math.nan

    def _evaluate(self) -> None:
        self._settle()
        acceptance = self.measure()
        losses, state = self._state.losses, self._state
        is_best = not state.evaluations or acceptance.mean_run >= self.best.acceptance.mean_run
        found = Evaluation(state.step, sum(losses) / max(1, len(losses)), acceptance)
        best = {name: weight.detach().clone() for name, weight in self._trainee.weights.items()}
        self._state = replace(state, best=best if is_best else state.best, losses=[],
                              evaluations=[*state.evaluations, found])
        rates = " ".join(f"{rate:.2f}" for rate in acceptance.by_position)
        self._report(f"held out after step {state.step}: accepted by position {rates}, "
                     f"{acceptance.mean_run:.3f} tokens a step; mean loss {found.loss:.3f}")

    def measure(self) -> HeldOutAcceptance:
        """Measure acceptance on the held-out texts with the current weights."""
        texts = self._texts.held_out
        lengths = [len(text.tokens) for text in texts]
        total = HeldOutAcceptance(0, (0,) * self._settings.passes)
        for group in micro_batches(range(len(texts)), lengths, self._micro_tokens):
            taught = self._teacher.teach([texts[index] for index in group])
            with self._arithmetic():
                total = total + held_out_acceptance(self._trainee, taught, self._ids)
        return total

    def _has_stalled(self) -> bool:
        """Whether none of the last `patience` evaluations was better than the best one before them. A run without any
        accepted draft continues, because its loss falls long before its acceptance rises."""
        runs, patience = [evaluation.acceptance.mean_run for evaluation in self.evaluations], self._settings.patience
        if len(runs) <= patience or max(runs) < LEAST_RUN:
            return False
        return max(runs[-patience:]) < max(runs[:-patience]) + LEAST_GAIN

    def _save(self) -> None:
        self._settle()
        replace(self._state, moments=self._optimizer.state()).write(self._workspace.checkpoint)

    def _arithmetic(self) -> AbstractContextManager[object]:
        """A context that computes products in bfloat16 on a GPU. Weights stay float32."""
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()
