"""METHODS: the kinds of drafters that can be trained, by name. No torch: a method's own file is imported when it runs.

To add a method, write one file with a subclass of `training.trainee.Trainee`, and add a line to this table.
"""

from __future__ import annotations

METHODS: dict[str, str] = {
    "eagle3": "outrider.training.eagle3:Eagle3Trainee",
    "block": "outrider.training.block:BlockTrainee",
    "mtp": "outrider.training.mtp:MTPTrainee",
}


def register_method(name: str, path: str) -> None:
    """Add a method. path: "package.module:Class" of its `Trainee`."""
    METHODS[name] = path
