"""How long the trainer works on the texts that it has: so many epochs, and anew after other weights of the target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core import Limits, RowEnd
from outrider.features.learning import learner as learner_module
from outrider.features.learning.learner import MOST_EPOCHS, ROUND_STEPS, STEP_TEXTS, DrafterLearner, LearningSettings
from outrider.features.learning.traffic import ServedText
from tests.unit.made_requests import made_admission

SEGMENT = 16
NUM_TEXTS = 16  # four of them are held out


class IdleCandidate:
    """Trains nothing, and is as good as the head that serves."""

    def __init__(self, *_: object) -> None:
        pass

    def restart(self) -> None:
        pass

    apply = restart

    def add_gradients(self, texts: list[ServedText], share: float) -> None:
        pass

    def measure(self, texts: list[ServedText], *, is_serving: bool) -> tuple[int, int]:
        return len(texts), len(texts)


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> DrafterLearner:
    """Without an engine, a head and a thread."""
    monkeypatch.setattr(learner_module, "Candidate", IdleCandidate)
    head = SimpleNamespace(aux_layers=(0,), target=SimpleNamespace(hidden_size=2, dtype=torch.float32))
    served: Any = SimpleNamespace(head=head, device=torch.device("cpu"))
    return DrafterLearner(served, Limits(2, 8, 32, 3, 99), LearningSettings(share=1.0, rate=1e-3),
                          4 * NUM_TEXTS * SEGMENT, SEGMENT)


def serve(learner: DrafterLearner, length: int) -> None:
    """Texts of so many tokens are served and end."""
    ring = learner.ring
    for _ in range(NUM_TEXTS):
        ring.admit([made_admission(1, [5], 32)])
        start = ring._open[1].start
        ring.positions[start : start + length] = torch.arange(length)
        ring.end([RowEnd(1, length)])


def count_rounds(learner: DrafterLearner) -> int:
    rounds = 0
    while rounds < 100 and learner._train_round():
        rounds += 1
    return rounds


def test_the_trainer_stops_after_the_most_epochs_over_its_texts(learner: DrafterLearner) -> None:
    serve(learner, SEGMENT)
    most = MOST_EPOCHS * learner.ring.num_tokens
    of_round = ROUND_STEPS * STEP_TEXTS * SEGMENT
    assert count_rounds(learner) == -(-most // of_round) == 2 and not learner._train_round()
    assert learner.report.num_steps == 2 * ROUND_STEPS
    serve(learner, SEGMENT)
    assert count_rounds(learner) > 0, "new texts may be learned from"


def test_after_new_weights_of_the_target_new_texts_are_trained_on_whatever_was_before(learner: DrafterLearner) -> None:
    """The last round went far over the bound of the old texts; the new ones are short."""
    serve(learner, SEGMENT)
    assert count_rounds(learner) == 2
    with learner.resting():
        learner.forget_model()
    assert count_rounds(learner) == 0, "there is nothing to learn from"
    serve(learner, 3)
    assert count_rounds(learner) > 0
