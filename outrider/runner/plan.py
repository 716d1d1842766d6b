"""StepPlan: the host's decisions about a step, apart from the step's shape. StepPlanner makes it for an uncaptured
batch.

The plan of a captured step follows from its key (`GraphKeys.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from outrider.core import SamplingParams, ScheduledBatch
from outrider.core.lazy_exports import LateModule
from outrider.core.step_messages import DeltaReach
from outrider.mixers.batch import NO_EXTRA_KEYS, ExtraKeys, NoExtraKeys
from outrider.mixers.recurrent import CheckpointTargets, RecurrentRows
from outrider.runner.batch import EagerShape
from outrider.runner.logits_part import LogitsPart
from outrider.runner.row_state import RowState
from outrider.sample import StepExtras, StepNeeds
from outrider.sample.sampler import kernels_serve

if TYPE_CHECKING:
    from outrider.layers import GivenRows
    from outrider.runner import component_ropes as ropes
    from outrider.runner import step_inputs as inputs
    from outrider.runner.component_ropes import ComponentRopes
    from outrider.runner.step_inputs import ComponentRows
else:
    ropes = LateModule("outrider.runner.component_ropes")
    inputs = LateModule("outrider.runner.step_inputs")


class RowAdditions(NamedTuple):
    """Inputs of a step's requests besides their token ids."""

    given_rows: GivenRows | None = None  # vectors in place of embeddings, at the step's token rows
    drafter_given_rows: GivenRows | None = None  # in a drafter's first pass: of the position after each token row's own
    extra_keys: ExtraKeys | NoExtraKeys = NO_EXTRA_KEYS  # of the padded tokens
    deltas: DeltaReach = DeltaReach.NOTHING  # what the rows' deltas may change
    rope_rows: ComponentRows | None = None  # token rows that ropes of several components rotate by these positions


IDS_ALONE = RowAdditions()


@dataclass(frozen=True)
class NoCheckpoints:
    """The step writes no recurrent state to pages."""


@dataclass(frozen=True)
class RowCheckpoints:
    """Each request may write one checkpoint, to the pages that its row was given. The packet has the position at which
    it is due."""


@dataclass(frozen=True)
class ListedCheckpoints:
    """Requests may write any number of checkpoints, which the host lists for this step."""

    targets: CheckpointTargets


CheckpointPlan = NoCheckpoints | RowCheckpoints | ListedCheckpoints


@dataclass(frozen=True)
class StepPlan:
    """The host's decisions about a step, apart from the step's shape."""

    needs: StepNeeds
    extras: StepExtras
    any_sampled: bool  # also for drafters
    num_wanted: int  # most drafts that the drafter shall propose for a request
    checkpoints: CheckpointPlan = NoCheckpoints()
    additions: RowAdditions = IDS_ALONE

    @property
    def failures(self) -> Mapping[int, str]:
        """Error messages of the requests whose logits could not be edited, by index. Complete when the step has
        sampled."""
        return {} if self.extras.editor is None else self.extras.editor.failures


def make_ropes(state: RowState) -> ComponentRopes:
    return ropes.ComponentRopes(state.limits, state.device)


class StepPlanner:
    def __init__(self, state: RowState, recurrent: RecurrentRows,
                 has_sampler_kernels: Callable[[], bool],
                 reach_of_deltas: Callable[[list[int]], DeltaReach] = lambda rows: DeltaReach.NOTHING) -> None:
        """reach_of_deltas: tells which parts of the model the low-rank deltas of the given rows change."""
        self._state, self._recurrent = state, recurrent
        self._has_sampler_kernels, self._reach_of_deltas = has_sampler_kernels, reach_of_deltas
        # What the last step asked of the sampler, which most steps ask again.
        self._asked: tuple[list[SamplingParams], list[int], bool, bool] = [], [], True, False
        self._needs, self._extras = StepNeeds(), StepExtras()
        self.editing: LogitsPart | None = None  # of a feature that edits logits; no step is captured with it

    def take_edits(self, part: LogitsPart) -> None:
        if self.editing is not None:
            raise ValueError(f"two features of this engine edit logits ({type(self.editing).__name__}, "
                             f"{type(part).__name__}), and only one may: start the engine without one of them")
        self.editing = part

    def plan(self, scheduled: ScheduledBatch, shape: EagerShape) -> StepPlan:
        state, counts = self._state, list(shape.logit_counts)
        editor = None if self.editing is None else self.editing.of_step(scheduled, counts)
        asked = state.params.of_rows(scheduled.rows)
        are_placed = state.sampling.lists.are_placed(scheduled.rows)
        any_masks = state.params.any_masks(scheduled.rows, counts)
        if self._asked != (asked, counts, are_placed, any_masks):
            self._needs = StepNeeds.from_params(asked, counts, are_lists_placed=are_placed, any_masks=any_masks,
                                                is_edited=editor is not None)
            self._extras = StepExtras()
            if not (self._has_sampler_kernels() and kernels_serve(self._needs)):
                self._extras = StepExtras.from_params(asked, counts, state.device)
            self._asked = asked, counts, are_placed, any_masks
        any_sampled = any(not params.is_greedy for params in asked)
        targets = self._recurrent.targets(scheduled, shape.requests)
        extras = self._extras if editor is None else replace(self._extras, editor=editor)
        return StepPlan(self._needs, extras, any_sampled, scheduled.drafting.num_wanted,
                        NoCheckpoints() if targets is None else ListedCheckpoints(targets),
                        self._additions(scheduled, shape))

    def _additions(self, scheduled: ScheduledBatch, shape: EagerShape) -> RowAdditions:
        chunks = self._state.params.inputs.take(scheduled)
        reach = self._reach_of_deltas(scheduled.rows)
        if not chunks:
            return RowAdditions(deltas=reach) if reach else IDS_ALONE
        lens, device, encoders = shape.queries.lens, self._state.device, self._state.params.inputs.encoders
        own, ahead = (inputs.find_given_rows(chunks, lens, device, ahead=ahead, encoders=encoders) for ahead in (0, 1))
        return RowAdditions(own, ahead, inputs.find_extra_keys(chunks, lens, shape.tokens, device), reach,
                            inputs.find_component_rows(chunks, lens, device))
