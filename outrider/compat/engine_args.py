"""EngineConfig from keyword arguments, including vLLM's, and EngineArgs, vLLM's name for it."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.compat.environment import explain_variables
from outrider.config import EngineConfig
from outrider.core.lazy_exports import LateModule

if TYPE_CHECKING:
    from outrider.compat import argument_parser, vllm_config
    from outrider.compat import settings as vllm_settings
    from outrider.compat.vllm_config import VllmConfig
else:
    argument_parser = LateModule("outrider.compat.argument_parser")
    vllm_config = LateModule("outrider.compat.vllm_config")
    vllm_settings = LateModule("outrider.compat.settings")

AnyParser = TypeVar("AnyParser", bound=argparse.ArgumentParser)


def config_for(front: str, model: str | None, settings: dict[str, Any]) -> EngineConfig:
    """Make the config of a class such as LLM from its keyword arguments. `front`: the class's name, with which error
    messages begin."""
    explain_variables()
    own = settings
    if not all(name in EngineConfig.__dataclass_fields__ and isinstance(value, int | float)
               for name, value in settings.items()):  # a number of a setting that is here means the same in vLLM
        own = vllm_settings.translate(front, settings, EngineConfig.__dataclass_fields__)
    if model is None:
        raise ValueError(f"{front} needs a model: a folder, a .gguf file, a hub id as owner/name, or 'smollm2'")
    return EngineConfig(model=str(model), **own)


@dataclass(frozen=True, init=False)
class EngineArgs(EngineConfig):
    """A config under vLLM's name, with its settings: `LLM(**asdict(EngineArgs("smollm2")))`."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        super().__init__(**asdict(config_for("EngineArgs", model, settings)))

    @staticmethod
    def add_cli_args(parser: AnyParser, async_args_only: bool = False) -> AnyParser:
        """Add a flag for every setting to a parser, including vLLM's. `async_args_only`: add none."""
        if not async_args_only:
            argument_parser.add_engine_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Read the settings from the arguments of a script with the flags of `add_cli_args`."""
        return cls(**argument_parser.engine_settings(args))

    def create_engine_config(self, usage_context: object = None) -> VllmConfig:
        """Return the settings in vLLM's groups, for reading: `EngineArgs(...).create_engine_config().cache_config`."""
        return vllm_config.VllmConfig.from_engine_config(self)
