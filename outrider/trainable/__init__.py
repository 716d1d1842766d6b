"""Draft networks as torch operations with gradients, for the trainers and for the drafter that learns while it serves.

`models/` has the same networks for serving.
"""
