"""Draft networks as torch operations with gradients, for the trainers and for the drafter that learns while it serves.

The networks that serve, which compute the same without gradients, are in `models/`.
"""
