"""Captured steps: which there are, how they are captured, warmed up and measured."""
