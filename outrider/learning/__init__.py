"""Draft heads with gradients, and the head that learns from the traffic while it serves. See docs/training.md."""
