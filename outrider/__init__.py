"""Outrider: exact speculative decoding for every shape of open-weight model.

Importing the package is cheap: torch is imported when an engine starts. Names that vLLM also has mean the same here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from outrider.compat.not_here import explain_missing_modules
from outrider.core.params import SamplingParams

if TYPE_CHECKING:
    from outrider.async_llm import AsyncLLM
    from outrider.async_llm import AsyncLLM as AsyncLLMEngine
    from outrider.beam_search import BeamSearchParams
    from outrider.compat.engine_args import EngineArgs
    from outrider.compat.engine_args import EngineArgs as AsyncEngineArgs
    from outrider.core.outputs import CompletionOutput, RequestOutput
    from outrider.core.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
    from outrider.core.prompts import PromptType as PromptType
    from outrider.core.structured import StructuredOutputsParams
    from outrider.llm import LLM
    from outrider.llm_engine import LLMEngine
    from outrider.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from outrider.pooling_params import PoolingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "BeamSearchParams",
           "ClassificationRequestOutput", "CompletionOutput",
           "EmbeddingRequestOutput", "EmbedsPrompt", "EngineArgs", "LLMEngine", "PoolingOutput", "PoolingParams",
           "PoolingRequestOutput", "RequestOutput", "SamplingParams", "ScoringRequestOutput", "StructuredOutputsParams",
           "TextPrompt", "TokensPrompt", "__version__"]

# Where a name is that is imported when it is first used.
HOMES = {
    "LLM": ("outrider.llm", "LLM"),
    "LLMEngine": ("outrider.llm_engine", "LLMEngine"),
    "AsyncLLM": ("outrider.async_llm", "AsyncLLM"),
    "AsyncLLMEngine": ("outrider.async_llm", "AsyncLLM"),
    "AsyncEngineArgs": ("outrider.compat.engine_args", "EngineArgs"),
    "EngineArgs": ("outrider.compat.engine_args", "EngineArgs"),
    "BeamSearchParams": ("outrider.beam_search", "BeamSearchParams"),
    "CompletionOutput": ("outrider.core.outputs", "CompletionOutput"),
    **dict.fromkeys(("ClassificationOutput", "EmbeddingOutput", "ScoringOutput"), ("outrider.outputs", "")),
    "ClassificationRequestOutput": ("outrider.pooling_outputs", "ClassificationRequestOutput"),
    "EmbedsPrompt": ("outrider.core.prompts", "EmbedsPrompt"),
    "EmbeddingRequestOutput": ("outrider.pooling_outputs", "EmbeddingRequestOutput"),
    "PoolingOutput": ("outrider.pooling_outputs", "PoolingOutput"),
    "PoolingParams": ("outrider.pooling_params", "PoolingParams"),
    "PoolingRequestOutput": ("outrider.pooling_outputs", "PoolingRequestOutput"),
    "PromptType": ("outrider.core.prompts", "PromptType"),
    "ScoringRequestOutput": ("outrider.pooling_outputs", "ScoringRequestOutput"),
    "RequestOutput": ("outrider.core.outputs", "RequestOutput"),
    "TextPrompt": ("outrider.core.prompts", "TextPrompt"),
    "TokensPrompt": ("outrider.core.prompts", "TokensPrompt"),
    "StructuredOutputsParams": ("outrider.core.structured", "StructuredOutputsParams"),
}
# Modules that `import vllm` imports, too.
MODULES = ("inputs", "outputs", "pooling_params", "sampling_params", "utils")
# Names of vLLM that are not here, with what to use instead.
NOT_HERE = {
    "ModelRegistry": "see docs/extending.md",
    "initialize_ray_cluster": "`outrider serve --ray` runs replicas on a Ray cluster",
}

# Modules at the places where vLLM has them are found behind those of this folder; see compat/__init__.py.
__path__.append(f"{__path__[0]}/compat/modules")
explain_missing_modules()


def __getattr__(name: str) -> object:
    if name in HOMES:
        module, attribute = HOMES[name]
        return getattr(import_module(module), attribute or name)
    if name in MODULES:
        return import_module(f"outrider.{name}")
    if name in NOT_HERE:
        raise ImportError(f"outrider.{name} is not supported: {NOT_HERE[name]}")
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
