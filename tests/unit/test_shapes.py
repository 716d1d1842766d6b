"""Types of shapes, views and plans: no field is optional, so that none can stand for a mode."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from outrider.kernels.drafting import DrafterCacheState, DraftPass, DraftPasses, DraftSamplingKeys, ReadingPass
from outrider.kernels.packet import StepExtents, StepPacket, packet_axes
from outrider.kernels.step import CommittedStep, PreparedStep, VerifiedStep
from outrider.mixers.batch import BatchView, DecodeQueries, ExactQueries, ForwardBatch, KeysFrom, MixedQueries
from outrider.mixers.latent.latent_mixer import GroupPlan
from outrider.mixers.paged import flex_backend, native_backend, torch_backend
from outrider.runner.batch import CapturedShape, EagerShape, Inputs, PaddedSize
from outrider.runner.graphs.keys import GraphKey
from outrider.runner.graphs.sizes import GraphSizes
from outrider.runner.plan import ListedCheckpoints, StepPlan

TYPES = [
    BatchView, CapturedShape, CommittedStep, DecodeQueries, DraftPass, DraftPasses, DraftSamplingKeys,
    DrafterCacheState, EagerShape, ExactQueries, ForwardBatch, GraphKey, GraphSizes, Inputs, KeysFrom,
    ListedCheckpoints, MixedQueries, PaddedSize, PreparedStep, ReadingPass, StepExtents, StepPacket, StepPlan,
    VerifiedStep, GroupPlan, flex_backend.Plan, native_backend.Plan, torch_backend.PaddedRequests, torch_backend.Plan,
]


def has_none(hint: Any) -> bool:
    return hint is NoneType or any(has_none(part) for part in get_args(hint))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_no_field_is_optional(kind: type) -> None:
    hints = get_type_hints(kind)
    assert hints and not {name for name, hint in hints.items() if has_none(hint)}


def test_an_optional_field_would_be_seen() -> None:
    assert has_none(tuple[int | None, ...]) and has_none(int | None) and not has_none(tuple[int, ...])


def test_every_field_of_a_packet_has_an_axis() -> None:
    extents = StepExtents(requests=3, tokens=7, logit_rows=5, max_drafts=2)
    assert len(packet_axes()) == len(StepPacket._fields) == len(extents.field_sizes)
    assert dict(zip(StepPacket._fields, extents.field_sizes, strict=True))["query_starts"] == 4
