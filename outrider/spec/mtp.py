"""Loads a target's own multi-token-prediction module as drafter. Its tensors lie in the target's checkpoint, or beside
it."""

from __future__ import annotations

from outrider.config import SpeculativeConfig
from outrider.models.head import load_head
from outrider.models.mtp import build_mtp
from outrider.models.sources import ModelSource, resolve
from outrider.spec.autoregressive import AutoregressiveDrafter
from outrider.spec.base import DraftBuild
from outrider.spec.eagle import head_drafter


def mtp_drafter(config: SpeculativeConfig, build: DraftBuild) -> AutoregressiveDrafter:
    head = build_mtp(build.target, first_layer=build.first_layer, dtype=build.dtype, device=build.device)
    load_head(head, lambda: _module_files(config, build), load_format=build.load_format, seed=build.seed)
    return head_drafter("mtp", head, config.num_speculative_tokens)


def _module_files(config: SpeculativeConfig, build: DraftBuild) -> ModelSource:
    files = config.model or build.target_source
    if files is None:
        raise ValueError("speculative_config: method 'mtp' needs 'model', the folder with the module's tensors")
    return resolve(files)
