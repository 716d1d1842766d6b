"""Kernels for Hopper cards, written in Gluon: warps that fetch, and groups of warps that multiply."""

from outrider.kernels.gpu.hopper.prefill import CONFIGS, HopperConfig, launch_prefill, takes_cache

__all__ = ["CONFIGS", "HopperConfig", "takes_cache", "launch_prefill"]
