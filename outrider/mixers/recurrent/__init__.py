"""Layers that keep a state per row: Mamba-2, gated delta and KDA."""

from outrider.kernels.recurrent import CheckpointTargets
from outrider.mixers.recurrent.base import RecurrentStep
from outrider.mixers.recurrent.rows import RecurrentRows

__all__ = ["CheckpointTargets", "RecurrentRows", "RecurrentStep"]
