"""Makes a drafter of the target's multi-token-prediction modules, and loads them. Their tensors are in the target's
checkpoint, or in a file beside it."""

from __future__ import annotations

from outrider.config import SpeculativeConfig
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import DraftBuild
from outrider.drafters.chained import ChainedDrafter
from outrider.drafters.eagle import head_drafter, warn_beyond
from outrider.models.head import load_head
from outrider.models.mtp import MTPHead, build_mtp_modules, no_module
from outrider.models.sources import ModelSource, resolve


def mtp_drafter(config: SpeculativeConfig, build: DraftBuild) -> AutoregressiveDrafter:
    modules = build_mtp_modules(build.target, first_layer=build.first_layer, dtype=build.dtype, device=build.device)
    if build.is_outline:
        _check_names(modules[0], config, build)
    for module in modules:
        load_head(module, lambda: _module_files(config, build), load_format=build.load_format, seed=build.seed,
                  keep_quantized=build.keep_quantized, rounds_output=build.rounds_output and module is modules[0])
    for module in modules[1:]:
        module.borrow_output(modules[0])
    return modules_drafter(modules, config.num_speculative_tokens)


def modules_drafter(modules: list[MTPHead], num_drafts: int) -> AutoregressiveDrafter:
    """Make the drafter for loaded modules. A single module makes all drafts, each from its previous output; several
    modules make one draft each."""
    if len(modules) == 1:
        return head_drafter("mtp", modules[0], num_drafts)
    warn_beyond("mtp", modules[0], num_drafts)
    return ChainedDrafter("mtp", modules, num_drafts)


def _check_names(module: MTPHead, config: SpeculativeConfig, build: DraftBuild) -> None:
    """Refuse files without the prediction module before any weight is read."""
    files, prefix = config.model or build.target_source, module.description.names.prefix
    if build.load_format != "dummy" and files is not None:
        source = resolve(files)
        if not any(name.startswith(prefix) for name in source.tensor_names()):
            raise no_module(f"{source.path}: no tensor begins with {prefix!r}")


def _module_files(config: SpeculativeConfig, build: DraftBuild) -> ModelSource:
    files = config.model or build.target_source
    if files is None:
        raise ValueError("speculative_config: method 'mtp' needs 'model', the folder with the module's tensors")
    return resolve(files)
