"""Checks a drafter's files and config before any weight is read: what loading would refuse minutes later."""

from __future__ import annotations

from dataclasses import replace

from outrider.config import SpeculativeConfig
from outrider.drafters.base import DraftBuild
from outrider.drafters.draft_model import DraftModelNetwork
from outrider.drafters.files import drafter_source, with_method
from outrider.models.eagle import build_eagle
from outrider.models.gemma4_assistant import build_assistant
from outrider.models.mtp import build_mtp_modules, no_module
from outrider.models.registry import build_model
from outrider.models.sources import resolve


def check_drafter(config: SpeculativeConfig, build: DraftBuild) -> None:
    """Raise ValueError for a drafter that does not fit. `build` is that of a target on torch's meta device, which has
    no numbers and takes no memory."""
    config = with_method(config, build)
    num_layers = 0
    for method in config.methods:
        num_layers += _check(method, config, replace(build, num_drafter_layers=num_layers))


def _check(method: str, config: SpeculativeConfig, build: DraftBuild) -> int:
    """The number of the drafter's attention layers."""
    match method:
        case "draft_model":
            source = drafter_source(config, build)
            model = build_model(source.config, dtype=build.dtype, device=build.device, source=str(source.config_file))
            return len(DraftModelNetwork(model, build.first_layer, build.target.vocab_size).attention_layers)
        case "eagle" | "eagle3":
            head = build_eagle(drafter_source(config, build).reader(), method, build.target,
                               first_layer=build.first_layer, max_len=build.max_len, dtype=build.dtype,
                               device=build.device)
            return len(head.attention_layers)
        case "gemma4_assistant":
            assistant = build_assistant(drafter_source(config, build).reader(), build.target,
                                        first_layer=build.first_layer, max_len=build.max_len, dtype=build.dtype,
                                        device=build.device)
            return len(assistant.attention_layers)
        case "mtp":
            return _check_modules(config, build)
        case _:  # without files
            return 0


def _check_modules(config: SpeculativeConfig, build: DraftBuild) -> int:
    modules = build_mtp_modules(build.target, first_layer=build.first_layer, dtype=build.dtype, device=build.device)
    files = config.model or build.target_source
    if build.load_format != "dummy" and files is not None:
        source = resolve(files)
        names, prefix = source.tensor_names(), modules[0].description.names.prefix
        if not any(name.startswith(prefix) for name in names):
            raise no_module(f"{source.path}: no tensor begins with {prefix!r}")
    return sum(len(module.attention_layers) for module in modules)
