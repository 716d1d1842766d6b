"""TrainingCheckpoint: one file with everything that a resumed run needs to continue as if it had not stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from outrider.training.loss import HeldOutAcceptance
from outrider.training.workspace import replace_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Evaluation:
    step: int  # steps that were done
    loss: float  # mean of the training loss since the evaluation before
    acceptance: HeldOutAcceptance


@dataclass(frozen=True)
class TrainingCheckpoint:
    step: int  # steps that were done
    weights: Tensors
    moments: Tensors  # of the optimizer
    best: Tensors  # weights with the largest held-out mean run so far
    evaluations: list[Evaluation] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of the steps since the last evaluation

    def write(self, path: Path) -> None:
        tensors = {f"{part}/{name}": tensor.detach().cpu().contiguous()
                   for part, own in (("weights", self.weights), ("moments", self.moments), ("best", self.best))
                   for name, tensor in own.items()}
        notes = {"step": self.step, "losses": self.losses,
                 "evaluations": [[e.step, e.loss, e.acceptance.num_places, e.acceptance.num_accepted]
                                 for e in self.evaluations]}
        replace_file(path, lambda other: save_file(tensors, other, metadata={"run": json.dumps(notes)}))

    @classmethod
    def read(cls, path: Path) -> TrainingCheckpoint:
        parts: dict[str, Tensors] = {"weights": {}, "moments": {}, "best": {}}
        try:
            with safe_open(path, framework="pt") as file:
                notes = json.loads(file.metadata()["run"])
                for full in file.keys():  # not a dict
                    part, _, name = full.partition("/")
                    parts[part][name] = file.get_tensor(full)
        except Exception as error:  # safetensors has an exception of its own for damaged files
            raise ValueError(f"{path} is not a checkpoint of a training run: {error}. Delete it, and training begins "
                             "anew") from None
        evaluations = [Evaluation(step, loss, HeldOutAcceptance(places, tuple(accepted)))
                       for step, loss, places, accepted in notes["evaluations"]]
        return cls(notes["step"], **parts, evaluations=evaluations, losses=notes["losses"])

    @staticmethod
    def num_bytes(num_parameters: int) -> int:
        """The size of a checkpoint's file: weights, two moments of the optimizer and the best weights, in float32."""
        return 16 * num_parameters
