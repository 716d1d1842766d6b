"""Loads EAGLE-1 and EAGLE-3 heads as drafters, and checks them. Their forward pass is in `models.eagle`."""

from __future__ import annotations

import logging

from outrider.config import SpeculativeConfig
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import DraftBuild
from outrider.drafters.files import drafter_source
from outrider.layers import Linear
from outrider.layers.base import find_modules
from outrider.models.eagle import build_eagle
from outrider.models.head import DraftHead, SlotHead, load_head

log = logging.getLogger("outrider")


def eagle_drafter(config: SpeculativeConfig, build: DraftBuild) -> AutoregressiveDrafter:
    return _load_drafter("eagle", config, build)


def eagle3_drafter(config: SpeculativeConfig, build: DraftBuild) -> AutoregressiveDrafter:
    return _load_drafter("eagle3", config, build)


def _load_drafter(method: str, config: SpeculativeConfig, build: DraftBuild) -> AutoregressiveDrafter:
    source = drafter_source(config, build)
    head = build_eagle(source.reader(), method, build.target, first_layer=build.first_layer, max_len=build.max_len,
                       dtype=build.dtype, device=build.device)
    if head.sizes.max_positions < build.max_len:
        log.warning("the %s head %s was made for %d positions and max_model_len is %d: it may guess badly beyond them",
                    method, source.name, head.sizes.max_positions, build.max_len)
    # A GPU reads the few megabytes of a head as fast in 16 bits; products of a CPU take half as long in 8.
    keep_quantized = build.keep_quantized and build.device.type == "cpu"
    load_head(head, lambda: source, load_format=build.load_format, seed=build.seed, keep_quantized=keep_quantized,
              rounds_output=build.rounds_output)
    if keep_quantized:  # drafts need not be accurate: rounding can cost a draft, and never changes the text
        for linear in find_modules([head], Linear):
            linear.format.round_activations()
    return head_drafter(method, head, config.num_speculative_tokens)


def head_drafter(method: str, head: SlotHead, num_drafts: int) -> AutoregressiveDrafter:
    warn_beyond(method, head, num_drafts)
    return AutoregressiveDrafter(method, head, num_drafts, head.aux_layers)


def warn_beyond(method: str, head: DraftHead, num_drafts: int) -> None:
    if head.made_for is not None and num_drafts > head.made_for and head.device.type != "meta":
        log.warning("num_speculative_tokens is %d and the %s head was made for %d: later drafts may seldom be accepted",
                    num_drafts, method, head.made_for)
