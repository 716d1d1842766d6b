"""Layers that keep a state per row: Mamba-2 and gated delta."""
