"""A model loaded once for a command, with a progress bar, and engines around it.

A command that compares several engines loads the weights only once. Knows nothing of what the engines then do.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from tqdm import tqdm

from outrider.config import EngineConfig
from outrider.engine.build import Prepare, assemble, load_tokenizer, pick_device, pick_dtype
from outrider.engine.engine import Engine
from outrider.engine.text import Tokenizer
from outrider.models.base import Model
from outrider.models.loader import load_dummy, load_weights
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.runner.memory import enough_memory


@dataclass(frozen=True)
class Loaded:
    name: str
    model: Model
    device: torch.device
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]

    def engine(self, config: EngineConfig, *, prepare: Prepare | None = None) -> Engine:
        return assemble(config, self.model, self.device, tokenizer=self.tokenizer, eos_ids=self.eos_ids,
                        prepare=prepare)

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer files, and text needs one: copy tokenizer.json beside the "
                             "weights")
        return self.tokenizer


def load(config: EngineConfig, *, needs_text: bool = True) -> Loaded:
    """`needs_text`: refuse a model without tokenizer before its weights are read."""
    device = pick_device(config.device)
    source = resolve(config.model, weights=config.load_format != "dummy")
    dtype = pick_dtype(config.dtype, source, device)
    with enough_memory("the weights", "choose a smaller model or dtype, or free what else is on the device"):
        model = build_model(source.config, dtype=dtype, device=device, max_len=config.max_model_len, source=source.name)
    loaded = Loaded(source.name, model, device, load_tokenizer(source), source.eos_token_ids)
    if needs_text:
        loaded.need_tokenizer()
    if config.load_format == "dummy":
        load_dummy(model, config.seed)
    else:
        tensors = source.read(keep_quantized=config.keep_quantized)
        load_weights(model, bar(tensors, total=len(model.weights()), desc=f"loading {source.name}", unit="tensors"))
    return loaded


def bar(items=None, **options):  # type: ignore[no-untyped-def]
    """A tqdm bar on a terminal, nothing elsewhere."""
    return tqdm(items, disable=not sys.stderr.isatty(), leave=False, dynamic_ncols=True, file=sys.stderr, **options)
