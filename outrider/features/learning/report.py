"""AdaptationReport: the progress of a drafter that is trained while it serves. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.feature_parts import Figure, ResultPart


@dataclass(frozen=True, slots=True)
class AdaptationReport(ResultPart):
    """The progress of the training: counts since the start, and the last measurement on held-out texts."""

    num_texts: int = 0  # texts that were recorded
    num_steps: int = 0  # optimizer steps of the trainer
    num_swaps: int = 0  # times that better weights replaced those that serve
    num_errors: int = 0  # times that the trainer failed
    serving_run: float = 0.0  # mean run of the serving head on held-out texts; 0 before the first measurement
    candidate_run: float = 0.0  # mean run of the head in training, on the same texts
    work_seconds: float = 0.0  # that the trainer has worked
    error: str = ""  # the last error of the trainer

    def figures(self) -> tuple[Figure, ...]:
        return (
            Figure("adapt_texts", "Served texts that the drafter may learn from.", self.num_texts),
            Figure("adapt_steps", "Training steps of the drafter.", self.num_steps),
            Figure("adapt_swaps", "Times that better weights replaced the drafter's.", self.num_swaps),
            Figure("adapt_errors", "Times that the drafter's trainer failed.", self.num_errors),
            Figure("adapt_work_seconds", "Time that the drafter's trainer has worked.", self.work_seconds),
            Figure("adapt_serving_mean_run", "Mean run of the drafter on held-out texts.", self.serving_run,
                   is_count=False),
            Figure("adapt_candidate_mean_run", "Mean run of the drafter in training on the same texts.",
                   self.candidate_run, is_count=False),
        )
