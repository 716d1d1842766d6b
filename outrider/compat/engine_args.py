"""EngineConfig from keyword arguments, among them those of vLLM, and EngineArgs, the name that vLLM has for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from outrider.compat.settings import translate
from outrider.config import EngineConfig


def config_for(front: str, model: str | None, settings: dict[str, Any]) -> EngineConfig:
    """The config of a front such as LLM, from its keyword arguments. `front` begins the messages."""
    own = translate(front, settings, EngineConfig.__dataclass_fields__)
    if model is None:
        raise ValueError(f"{front} needs a model: a folder, a .gguf file, a hub id as owner/name, or 'smollm2'")
    return EngineConfig(model=str(model), **own)


@dataclass(frozen=True, init=False)
class EngineArgs(EngineConfig):
    """A config by the name that it has in vLLM, with its settings: `LLM(**asdict(EngineArgs("smollm2")))`."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        super().__init__(**asdict(config_for("EngineArgs", model, settings)))
