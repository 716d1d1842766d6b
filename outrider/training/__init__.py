"""Trains draft heads for a model that the engine serves: `outrider train-drafter`. See docs/training.md."""
