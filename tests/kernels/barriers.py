"""Barriers of a compiled kernel, by its PTX: where they are, and whether anything else is stored there."""

from __future__ import annotations

import re


def overwritten_barriers(ptx: str) -> list[int]:
    """Places in shared memory that are made barriers and that ordinary loads and stores name as well."""
    names = set(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx))
    places = {name: int(place) for name, start, place in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx)
              if start in names}  # fmt: skip
    places |= dict.fromkeys(names, 0)
    barriers = {places[name] for name in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)}
    assert barriers, "a kernel with barriers, or this does not know how they are written"
    # Bytes are Triton's own, one for each warp that is not of the first kind; their place is counted from warp 0.
    named = re.findall(r"(?:ld|st)\.shared(?!\.b8)\S*\s[^\[\n]*\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+))?\s*\]", ptx)
    used = {places.get(name, 0) + int(offset or 0) for name, offset in named}
    assert used, "ordinary loads and stores, too"
    return sorted(place for place in used if place // 8 * 8 in barriers)
