"""Ropes that rotate by several position components, as in Qwen's vision models: reads their config keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import LateModule
from outrider.layers import RopeParams, Rotary
from outrider.models.base import Decoder
from outrider.models.config import ConfigReader

if TYPE_CHECKING:
    from outrider.layers import component_rotary
else:
    component_rotary = LateModule("outrider.layers.component_rotary")

Sections = tuple[int, ...]


def read_sections(rope: ConfigReader, default: Sections) -> Sections:
    """Read how many frequencies rotate by each component of a position: time, row and column. rope: the section that
    describes the rope."""
    rope.must_equal("mrope_interleaved", True, default=True)
    sections = rope.get("mrope_section", list[int], list(default))
    if len(sections) != len(default):
        raise rope.refusal("mrope_section", "it must have a number for time, for rows and for columns")
    return tuple(sections)


def make_component_rotary(model: Decoder, rope: RopeParams, sections: Sections, max_len: int | None) -> Rotary:
    return component_rotary.ComponentRotary(rope, sections, max_len=max_len or model.max_positions, dtype=model.dtype,
                                            device=model.device)
