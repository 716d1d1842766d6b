"""Prefill attention for Hopper cards, written in Gluon: warps that fetch pages, and groups of warps that attend."""

from outrider.kernels.triton.hopper.prefill import CONFIGS, HopperConfig, fits_hopper, launch_hopper

__all__ = ["CONFIGS", "HopperConfig", "fits_hopper", "launch_hopper"]
