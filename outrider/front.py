"""Front, the base class of LLM, LLMEngine and AsyncLLM. It starts an engine from arguments, and explains why a name of
vLLM is not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast

from outrider import compat
from outrider.compat.engine_args import config_for
from outrider.config import EngineConfig
from outrider.core.lazy_exports import LateModule
from outrider.core.prompts import Prompt
from outrider.engine.engine import Engine
from outrider.engine.start import start_engine
from outrider.engine.text import Tokenizer
from outrider.feature_list import feature_object

if TYPE_CHECKING:
    from outrider.compat import vllm_config as vllm_configs
    from outrider.compat import worker_extension as extensions
    from outrider.compat.engine_args import EngineArgs
    from outrider.compat.vllm_config import ModelConfig, VllmConfig
    from outrider.compat.worker_extension import ExtendedWorker
    from outrider.engine import maintenance
    from outrider.engine.maintenance import Maintenance
else:
    extensions = LateModule("outrider.compat.worker_extension")
    maintenance = LateModule("outrider.engine.maintenance")
    vllm_configs = LateModule("outrider.compat.vllm_config")


class Front:
    _streams = False  # whether tokens are read as they come
    _extension: ExtendedWorker | None = None  # of collective_rpc, made by its first call
    _config: EngineConfig | None = None  # None: built around an engine, whose settings are not known

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        config = config_for(type(self).__name__, model, settings)
        self._config = config.for_streams() if self._streams else config
        self._start(start_engine(self._config))
        self._config = self.engine.model.config  # with what `fit` chose

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start an engine with the settings of EngineArgs."""
        return cls(**asdict(engine_args))

    @classmethod
    def around(cls, engine: Engine) -> Self:
        """Make a front (an LLM, for example) around an engine that is already built. The front then owns the engine."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: Engine) -> None:
        self.engine = engine

    @cached_property
    def _maintenance(self) -> Maintenance:
        return maintenance.Maintenance(self.engine)

    @property
    def weights_version(self) -> int:
        """Number of weight updates that were completed. Each output says in `weight_versions` which of its tokens came
        from which version. Prefix hits only use pages that the current version has computed."""
        return self.engine.weights_version

    @property
    def vllm_config(self) -> VllmConfig:
        """The engine's settings and sizes for reading, grouped as in vLLM: `vllm_config.cache_config.block_size`."""
        if self._config is None:
            raise ValueError("vllm_config is not available, because the engine was not built from an EngineConfig: "
                             "read engine.limits instead")
        num_pages = self.engine.scheduler.cache.pool.num_pages
        return vllm_configs.VllmConfig.from_engine_config(self._config, self.engine.limits, num_pages)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    def get_model_config(self) -> ModelConfig:
        """Return `model_config`. Earlier versions of vLLM have this method."""
        return self.model_config

    def _call_worker(self, load_weights: Callable[[Any], None], *call: Any) -> list[Any]:
        if self._extension is None:
            self._extension = extensions.ExtendedWorker(self._config, load_weights)
        return self._extension.call(*call)

    def _profile_dir(self) -> str:
        """Return the folder for profiles. Raises an error if none is set, before a profile begins."""
        folder = None if self._config is None else self._config.profiler_dir
        if folder is None:
            raise ValueError("profiles need a folder: start the engine with profiler_dir='profiles'")
        return folder

    def chat_prompt(self, messages: Any, **options: Any) -> Prompt:
        """Return the prompt of a conversation. Messages may have images, if the model supports images."""
        if self.engine.model.takes_images:
            make = feature_object("images", "outrider.features.images.chat:chat_prompt")
            return cast(Prompt, make(self.get_tokenizer(), messages, options))
        return self.get_tokenizer().encode_chat(messages, **options)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises an error if it has none."""
        return self.engine.model.need_tokenizer()

    if not TYPE_CHECKING:  # a checker knows which methods there are

        def __getattr__(self, name: str) -> Any:
            front = type(self).__name__
            if name in compat.NOT_SERVED:
                raise AttributeError(f"{front}.{name} is not supported: {compat.NOT_SERVED[name]}")
            raise AttributeError(f"{front} has no {name!r}")
