"""Loads a model for a command, with a progress bar, and makes LLMs with it.

A command that compares several engines loads the weights only once. Torch is imported after the model's files are
found, so that a misspelt name is reported at once.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.config import EngineConfig
from outrider.core.status_line import status_line
from outrider.engine.assembly import engine_around
from outrider.engine.collector import collections_paused, freeze_heap
from outrider.engine.fit import fit_to_memory
from outrider.engine.load import find_model, load_tokenizer, read_tokenizer
from outrider.engine.progress import loading_bar
from outrider.engine.start import start_engine
from outrider.engine.text import Tokenizer
from outrider.engine.torch_libraries import load_torch_libraries_ahead
from outrider.llm import LLM
from outrider.models.sources import DEFAULT_MODEL
from outrider.models.sources.model_source import ModelSource
from outrider.models.sources.smollm2 import smollm2_path

if TYPE_CHECKING:
    import torch

    from outrider.models.base import Model
    from outrider.runner.worker import Prepare, Worker

SIZES = {"GB": 10**9, "MB": 10**6, "kB": 10**3}
NO_TOKENIZER = ("this command reads or writes text, and the tokenizer of {} was not loaded: leave out "
                "--skip-tokenizer-init")


@dataclass(frozen=True)
class Loaded:
    name: str
    model: Model
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]

    @property
    def outline(self) -> Model:
        """The loaded model, from which sizes and dtype are read."""
        return self.model

    @property
    def device(self) -> torch.device:
        return self.model.device

    def worker(self, config: EngineConfig, *, prepare: Prepare = lambda model, drafter: None) -> Worker:
        from outrider.runner.worker import Worker

        return Worker(config, self.model, eos_ids=self.eos_ids, prepare=prepare)

    def llm(self, config: EngineConfig, worker: Worker | None = None) -> LLM:
        """Make an LLM with the loaded model. `worker`: a worker that has started; a new one by default."""
        engine = engine_around(config, worker or self.worker(config), self.tokenizer)
        freeze_heap(engine)
        return LLM.around(engine)

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER.format(self.name))
        return self.tokenizer


@dataclass(frozen=True)
class OnRanks:
    """A model that is found but not loaded yet: several ranks, each in a separate process, load it when an LLM is
    made."""

    source: ModelSource
    tokenizer: Tokenizer | None
    config: EngineConfig

    @property
    def name(self) -> str:
        return self.source.name

    @cached_property
    def outline(self) -> Model:
        """The model on the meta device, without memory for weights, from which sizes and dtype are read."""
        from outrider.models.registry import build_model
        from outrider.runner.device import pick_dtype

        dtype = pick_dtype(self.config.dtype, self.source, self.device)
        return build_model(self.source.config, dtype=dtype, device="meta", source=str(self.source.config_file),
                           model_impl=self.config.model_impl)

    @property
    def device(self) -> torch.device:
        from outrider.runner.device import pick_device

        return pick_device(self.config.device)

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER.format(self.name))
        return self.tokenizer

    def llm(self, config: EngineConfig) -> LLM:
        """Make an LLM whose ranks load the model. A single rank also runs in a separate process."""
        return LLM.around(start_engine(config, in_process=True))


def loading_text(model: str) -> str:
    """Name the model that is loaded, and the size of its files if they are present. It is printed before the slow work
    begins."""
    num_bytes = 0
    with suppress(OSError, ValueError, RuntimeError):  # no name of files: finding the model tells
        path = smollm2_path() if model == DEFAULT_MODEL and not Path(model).exists() else Path(model).expanduser()
        files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
        num_bytes = sum(file.stat().st_size for file in files)
    unit, scale = next(((unit, scale) for unit, scale in SIZES.items() if num_bytes >= scale), ("bytes", 1))
    return f"loading {model} ({num_bytes / scale:.{unit == 'GB':d}f} {unit})" if num_bytes else f"loading {model}"


def load_or_find(config: EngineConfig, *, needs_text: bool = True) -> Loaded | OnRanks:
    """Load the model of a config. If several ranks are to load it, only find its files. `needs_text`: refuse a model
    without tokenizer."""
    if config.tensor_parallel_size == 1:
        return load(config, needs_text=needs_text)
    with status_line(loading_text(config.model)):
        source = find_model(config)
        return OnRanks(source, _tokenizer(config, source, needs_text), config)


def load(config: EngineConfig, *, needs_text: bool = True) -> Loaded:
    """Load the model of a config. `needs_text`: refuse a model without tokenizer before its weights are read."""
    if config.tensor_parallel_size > 1:
        raise ValueError(f"tensor_parallel_size={config.tensor_parallel_size}: this command runs on one device: leave "
                         "tensor_parallel_size out, or use generate, chat, run-batch, verify, bench throughput, bench "
                         "latency or serve")
    with status_line(loading_text(config.model)), collections_paused():
        load_torch_libraries_ahead()
        source = find_model(config)
        tokenizer = _tokenizer(config, source, needs_text)
        from outrider.runner.target import load_target
    gc.freeze()  # what was imported stays until the process ends: `freeze_heap` need not look at it
    return Loaded(source.name, load_target(config, source, loading_bar(source.name)), tokenizer, source.eos_token_ids)


def fitted(config: EngineConfig) -> EngineConfig:
    """Return the config with the settings that fit the device's memory, if it asks for them."""
    if not config.fit:
        return config
    return fit_to_memory(config, find_model(config), apart=config.tensor_parallel_size > 1)



def _tokenizer(config: EngineConfig, source: ModelSource, needs_text: bool) -> Tokenizer | None:
    if not needs_text:
        return load_tokenizer(config, source)
    if config.skip_tokenizer_init:
        raise ValueError(NO_TOKENIZER.format(source.name))
    return read_tokenizer(config, source)
