"""Front, the base of LLM and AsyncLLM: how they are made from arguments, and answers for names that only vLLM has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from outrider.compat.engine_args import EngineArgs, config_for
from outrider.compat.settings import NO_IMAGES
from outrider.compat.vllm_config import ModelConfig, VllmConfig
from outrider.config import EngineConfig
from outrider.core.fields import shown, unknown_name
from outrider.core.params import SamplingParams
from outrider.core.pooling import PoolingRequestOutput
from outrider.engine.engine import Engine
from outrider.engine.maintenance import Maintenance
from outrider.engine.start import start_engine
from outrider.engine.text import Tokenizer

# Methods of vLLM's fronts that are not there, with what to do instead.
NOT_SERVED = {
    "classify": "use AsyncLLM.encode with PoolingParams(task='classify')",
    "reward": "use LLM.encode with pooling_task='classify' or 'token_classify'",
    "add_lora": "give lora_request with the prompts, which loads the adapter",
    "remove_lora": "an adapter that was not used lately makes room for others; AsyncLLM has remove_lora",
    "list_loras": "adapters are known by the lora_request of each call",
    "pin_lora": "max_cpu_loras says how many adapters stay in the host's memory",
    "apply_model": "the model lives with its worker: docs/extending.md says how to add parts",
    "get_metrics": "outputs have metrics of their requests, and the server has /metrics",
    "llm_engine": "AsyncLLM has the methods itself, such as get_tokenizer",
    "set_tokenizer": "give tokenizer= when the engine starts",
    "collective_rpc": "docs/extending.md says how to send commands to a worker, of which every rank gets them",
}


# Arguments of vLLM's methods that are not there, with what to do instead. None asks for nothing, and is accepted.
NO_ARGUMENTS = {
    "guided_options_request": "use structured_outputs of SamplingParams",
    "mm_processor_kwargs": NO_IMAGES,
    "prompt_adapter_request": "prompt adapters are not served: give lora_request",
    "tokenization_kwargs": "encode the prompt with get_tokenizer() and give prompt_token_ids",
    "truncate_prompt_tokens": "encode the prompt with get_tokenizer() and give its last tokens",
}


class Front:
    _streams = False  # whether tokens are read as they come
    _config: EngineConfig | None = None  # None: built around an engine, whose settings are not known

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        config = config_for(type(self).__name__, model, settings)
        self._config = config.for_streams() if self._streams else config
        self._start(start_engine(self._config))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine with the settings of EngineArgs."""
        return cls(**asdict(engine_args))

    @classmethod
    def around(cls, engine: Engine) -> Self:
        """A front for an engine that is already built; it belongs to the front from now on."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: Engine) -> None:
        self.engine, self._maintenance = engine, Maintenance(engine)

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's settings and sizes in vLLM's groups, to be read: `vllm_config.cache_config.block_size`."""
        if self._config is None:
            raise ValueError("the settings of an engine that was built elsewhere are not known: see engine.limits")
        num_pages = self.engine.scheduler.cache.pool.num_pages
        return VllmConfig.from_engine_config(self._config, self.engine.limits, num_pages)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    def get_model_config(self) -> ModelConfig:
        """The name that earlier versions of vLLM have for `model_config`."""
        return self.model_config

    def _profile_dir(self) -> str:
        """The folder for profiles. Raises an error if none is set, before a profile begins."""
        folder = None if self._config is None else self._config.profiler_dir
        if folder is None:
            raise ValueError("profiles need a folder: start the engine with profiler_dir='profiles'")
        return folder

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises an error if it has none."""
        return self.engine.model.need_tokenizer()

    @staticmethod
    def _as_tensors(outputs: Sequence[PoolingRequestOutput]) -> None:
        from outrider.runner.prompt_reports import as_tensors  # with torch, which the engine has imported

        as_tensors(outputs)

    if not TYPE_CHECKING:  # a checker knows which methods there are

        def __getattr__(self, name: str) -> Any:
            front = type(self).__name__
            if name in NOT_SERVED:
                raise AttributeError(f"{front}.{name} is not supported: {NOT_SERVED[name]}")
            raise AttributeError(f"{front} has no {name!r}")


def refuse_misplaced(call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError for keyword arguments that a method does not have, and say where they belong."""
    for name, value in given.items():
        if name in NO_ARGUMENTS and value is None:
            continue
        if name in NO_ARGUMENTS:
            raise TypeError(f"{call.__qualname__}: {name} is not supported: {NO_ARGUMENTS[name]}")
        refuse_sampling_field(call, name, value)
        known = [parameter for parameter in inspect.signature(call).parameters if parameter != "misplaced"]
        raise TypeError(f"{call.__qualname__}: {unknown_name('argument', name, known)}")


def refuse_sampling_field(call: Callable[..., Any], name: str, value: Any) -> None:
    """Raise TypeError for a sampling parameter that was given beside the sampling parameters."""
    if name in SamplingParams.__dataclass_fields__:
        raise TypeError(f"{call.__qualname__}: {name} is a field of SamplingParams: write "
                        f"sampling_params=SamplingParams({name}={shown(value)})")
