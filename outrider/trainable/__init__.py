"""Draft networks as torch operations with gradients, for the trainers and for the drafter that learns while it serves.

The serving forms of the same networks are in `models/`.
"""
