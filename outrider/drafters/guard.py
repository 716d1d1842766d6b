"""DrafterGuards: the only place where a step calls drafters, and where their results enter the engine.

A drafter may be a user's own class. Even if it raises errors or returns or writes wrong values, requests get the same
tokens as without a drafter. Exceptions are caught here, and so are values of a wrong type, shape, dtype or device.
Counts and token ids are checked on the device (`store_drafts` in `kernels/step.py`), because the host does not wait for
them; `report` turns the device's findings into faults when a step's result is read."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from outrider.core import Admission, Limits, ScheduledBatch, StepPart
from outrider.core.drafter_faults import FaultKind, FaultRecord, words_of
from outrider.core.ranks import RankLost
from outrider.core.step_messages import DraftingReport
from outrider.drafters.base import Drafter, Drafts, HiddenReads, Step
from outrider.drafters.choice import ProposalChoice
from outrider.drafters.combined import CombinedDrafter
from outrider.formats.ranks import RankGroup, integers_of_rank_0
from outrider.kernels.buffers import to_device
from outrider.kernels.step import Proposal, WrongValue

if TYPE_CHECKING:
    from outrider.drafters.observer import DraftObserver
    from outrider.drafters.view_of import ViewOf

Made = TypeVar("Made")
WithoutSums: TypeAlias = Callable[[], AbstractContextManager[None]]


class WrongForm(ValueError):
    """Raised if a drafter returned something other than drafts for the step's requests."""


class SpoiledRows(RuntimeError):
    """Raised if a drafter has written to the engine's state of the batch rows. No row can be trusted until all requests
    are admitted again."""


class DrafterGuard:
    """Calls one drafter. It counts the drafter's faults, and watches the tensors that the drafter must not write to."""

    def __init__(self, drafter: Drafter, group: RankGroup | None, without_sums: WithoutSums) -> None:
        self.drafter = drafter
        self._group, self._without_sums = group, without_sums
        self.record = FaultRecord.for_drafter(drafter)
        # Drafters of this package are held to the rules by tests; others are watched while the engine runs.
        self.is_foreign = type(drafter).__module__.partition(".")[0] != "outrider"
        self._watched: tuple[torch.Tensor, ...] = ()
        self.has_written = False

    def watch(self, row_tensors: Sequence[torch.Tensor]) -> None:
        # Inference tensors do not count their writes; row state is made of ordinary tensors.
        self._watched = tuple(t for t in row_tensors if not t.is_inference()) if self.is_foreign else ()

    def admit(self, admissions: list[Admission]) -> None:
        self._call("admit()", lambda: self.drafter.admit(admissions))

    def reset(self) -> None:
        self.has_written = False
        self._call("reset()", self.drafter.reset)

    def fill_slots(self, view_of: ViewOf, *, is_cold: bool) -> None:
        self._call("fill_slots()", lambda: self.drafter.fill_slots(view_of, is_cold=is_cold))

    def skip(self, step: Step) -> None:
        self._call("skip()", lambda: self.drafter.skip(step))

    def propose(self, step: Step) -> Proposal | None:
        """Return the drafter's proposal; None if the drafter is off or has failed."""
        return self._call("propose()", lambda: _checked(self.drafter.propose(step), step))

    def _call(self, name: str, method: Callable[[], Made]) -> Made | None:
        """Call a method of the drafter. If that fails, the fault is noted and None is returned.

        On several ranks a drafter of this package sums over ranks. If it fails on one rank, the others wait in a sum,
        and the step fails. A user's drafter may fail on one rank alone, because it has no means to sum over ranks."""
        if self.record.is_off:
            return None
        before = self._num_writes()
        try:
            with self._without_sums() if self.is_foreign else nullcontext():
                made = method()
        except (torch.OutOfMemoryError, RankLost):  # the device's lack, or a rank's, which the runner answers
            raise
        except WrongForm as error:
            self._note(FaultKind.FORM, f"{name} returned {error}")
            return None
        except Exception as error:
            self._note(FaultKind.RAISED, f"{name} raised {words_of(error)}", "".join(traceback.format_exception(error)))
            if self._group is not None and not self.is_foreign:
                raise
            return None
        finally:
            has_written = self._num_writes() != before
            if has_written:
                self.has_written = True
                self._note(FaultKind.WROTE, f"{name} wrote to the tensors of the engine's rows", at_once=True)
        return None if has_written else made

    def _num_writes(self) -> int:
        return sum(tensor._version for tensor in self._watched)

    def _note(self, kind: FaultKind, message: str, trace: str = "", at_once: bool = False) -> None:
        # A graph would repeat the fault for ever, so a fault during a capture switches the drafter off at once.
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.record.add(kind, message, trace=trace, at_once=at_once or is_capturing)


def _checked(drafts: object, step: Step) -> Proposal:
    """Return the drafts as tensors, if they have the shape and dtype that kernels take. Raises WrongForm otherwise.
    Their values are not read."""
    rows = step.batch.padded.rows
    if not isinstance(drafts, Drafts):
        raise WrongForm(f"{type(drafts).__name__}, not Drafts")
    shapes = {"tokens": (rows.shape[0], step.num_wanted), "counts": (rows.shape[0],)}
    if drafts.levels is not None:
        shapes["levels"] = (rows.shape[0],)
    for name, shape in shapes.items():
        tensor = getattr(drafts, name)
        wanted = f"int64 {list(shape)} on {rows.device}"
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise WrongForm(f"{name} of type {type(tensor).__name__}, where {wanted} is wanted")
        if tensor.dtype is not torch.int64 or tensor.device != rows.device or tuple(tensor.shape) != shape:
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
            raise WrongForm(f"{name} of {found}, where {wanted} is wanted")
    levels = None if drafts.levels is None else _plain(drafts.levels).contiguous()
    return Proposal(_plain(drafts.tokens), _plain(drafts.counts).contiguous(), levels)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a plain torch.Tensor, without the methods of a subclass."""
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


class DrafterGuards(StepPart):
    """The guards of all drafters of an engine, one for each drafter."""

    def __init__(self, drafter: Drafter | None, group: RankGroup | None = None,
                 without_sums: WithoutSums = nullcontext, observers: Sequence[DraftObserver] = ()) -> None:
        """group: the ranks that run the drafters; each rank has a copy or a part of them. without_sums: makes a context
        in which the ranks refuse to sum, for users' drafters. observers: objects that are told of all steps."""
        self._group, self._observers = group, observers
        parts = drafter.drafters if isinstance(drafter, CombinedDrafter) else [] if drafter is None else [drafter]
        self._guards = tuple(DrafterGuard(part, group, without_sums) for part in parts)
        # Read once: these decide what a captured step contains.
        self.aux_layers = () if drafter is None else tuple(drafter.aux_layers)
        self.reads_hidden = HiddenReads.NOTHING if drafter is None else drafter.reads_hidden
        self.has_layers = drafter is not None and bool(drafter.attention_layers)
        self.lookahead = 0 if drafter is None else drafter.lookahead  # slots past the computed tokens that they write
        self._num_told_off = 0  # drafters that the device knows to be off
        self._choice: ProposalChoice | None = None  # between several drafters

    def __bool__(self) -> bool:
        return bool(self._guards)

    def bind(self, row_tensors: Sequence[torch.Tensor], limits: Limits, device: torch.device,
             make_view_of: Callable[[], ViewOf]) -> None:
        """Bind all drafters before the first step. Called only if there are drafters. row_tensors: row state that
        drafters see and must not write to. make_view_of: makes the object that makes batches of admitted rows."""
        self._choice = ProposalChoice(len(self._guards), limits, device) if len(self._guards) > 1 else None
        self.is_on = torch.ones(len(self._guards), dtype=torch.int64, device=device)
        self._num_told_off = 0
        if self._guards:
            self._view_of = make_view_of()
        for guard in self._guards:
            guard.watch(row_tensors)
        for observer in self._observers:
            observer.bind(limits)

    @contextmanager
    def observers_resting(self) -> Iterator[None]:
        """Context manager: inside it no observer uses the device."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.resting())
            yield

    def begin(self, batch: ScheduledBatch) -> None:
        self.tell_device()
        for observer in self._observers:
            observer.begin(batch)

    @property
    def num_off(self) -> int:
        return sum(guard.record.is_off for guard in self._guards)

    def admit(self, admissions: Sequence[Admission]) -> None:
        admissions = list(admissions)
        if self._choice is not None:
            self._choice.admit(admissions)
        for guard in self._guards:
            guard.admit(admissions)
        for observer in self._observers:
            observer.admit(admissions)

    def prepare(self, batch: ScheduledBatch) -> None:
        """Let drafters fill the slots of prefix-hit tokens that newly admitted rows lack."""
        for guard in self._guards:
            guard.fill_slots(self._view_of, is_cold=batch.drafting.num_wanted == 0)
        for observer in self._observers:
            observer.prepare(batch)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()

    def load_filling(self, dead: list[Admission], view_of: ViewOf) -> None:
        """Run the slot filling of this package's drafters once, so that its kernels are loaded before requests come.
        dead: admissions of the null row, whose results are dropped."""
        for guard in self._guards:
            if not guard.is_foreign:
                guard.admit(dead)
                guard.fill_slots(view_of, is_cold=False)

    def reset(self) -> None:
        for guard in self._guards:
            guard.reset()
        for observer in self._observers:
            observer.reset()

    def aux_layers_for(self, num_wanted: int) -> tuple[int, ...]:
        """Return the layers whose hidden states the target records for drafters, in a step that asks for `num_wanted`
        drafts. Recording takes time and memory, and few drafters read the hidden states of a step without drafts."""
        reads_always = any(guard.drafter.aux_layers and guard.drafter.skip_reads_aux for guard in self._guards)
        is_needed = num_wanted > 0 or bool(self._observers) or reads_always
        return self.aux_layers if is_needed else ()

    def skip(self, step: Step) -> None:
        for observer in self._observers:
            observer.record(step)
        if self._choice is not None:
            self._choice.skip(step)
        for guard in self._guards:
            guard.skip(step)

    def propose(self, step: Step) -> list[Proposal] | None:
        """Return the proposal of every drafter, empty for a drafter that is off or has failed. None if no drafter has a
        proposal. With several drafters only one has drafts for a request (`ProposalChoice`). On several ranks the
        drafts of rank 0 count, because a user's drafters may draft differently or fail on one rank only."""
        for observer in self._observers:
            observer.record(step)  # before drafters, which may write to the hidden states
        found = [guard.propose(step) for guard in self._guards]
        group = None if self._trusts_all else self._group
        if group is None and all(proposal is None for proposal in found):
            return None
        rows = step.batch.padded.rows
        filled = [own or Proposal(rows.new_zeros(rows.shape[0], step.num_wanted), torch.zeros_like(rows))
                  for own in found]
        if group is not None:
            filled = self._drafts_of_rank_0(filled, group)
        return filled if self._choice is None else self._choice.choose(step, filled, self.is_on)

    def _drafts_of_rank_0(self, own: list[Proposal], group: RankGroup) -> list[Proposal]:
        num_rows, width = own[0].tokens.shape
        flags = self.is_on.expand(num_rows, -1)
        packed: list[torch.Tensor] = []
        for tokens, counts, levels in own:
            packed += [tokens, counts[:, None], (torch.zeros_like(counts) if levels is None else levels)[:, None]]
        found = integers_of_rank_0(group, torch.cat([*packed, flags], 1))
        *parts, flags = found.split([width + 2] * len(own) + [len(own)], 1)
        self.is_on.copy_(flags[0])
        return [Proposal(part[:, :width], part[:, width].contiguous(), part[:, width + 1].contiguous())
                for part in parts]

    @property
    def _trusts_all(self) -> bool:
        return not any(guard.is_foreign for guard in self._guards)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of row state to show to drafters. If a drafter changes the view's shape in place (`resize_`,
        `t_`), the engine's tensor keeps its shape. If a drafter writes to the view, torch also raises the version
        counter of the engine's tensor, so the write is detected."""
        return tensor if self._trusts_all else tensor.detach()

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of a step that the engine needs after drafting. They are copied if a drafter may write to
        them."""
        return [tensor if self._trusts_all else tensor.clone() for tensor in tensors]

    def tell_device(self) -> None:
        """Update the device's flags of which drafters are on, so that captured steps drop the drafts of drafters that
        were switched off after the capture."""
        if self.num_off != self._num_told_off:
            flags = [int(not guard.record.is_off) for guard in self._guards]
            self._num_told_off = len(flags) - sum(flags)
            self.is_on.copy_(to_device(flags, torch.int64, self.is_on.device))

    def check_rows(self) -> None:
        """Raise SpoiledRows if a drafter has written to the engine's state of the rows. The step then fails, and all
        requests are admitted again."""
        for guard in self._guards:
            if guard.has_written:
                raise SpoiledRows(f"drafter {guard.record.drafter} wrote to the tensors of the engine's rows; all "
                                  "requests are admitted again. Correct the drafter")

    def report(self, found: Sequence[WrongValue]) -> DraftingReport:
        """Called when a step's result is read. Returns the faults since the last report. found: the faults that the
        device found in steps."""
        for index, guard in enumerate(self._guards):
            own = next((fault for fault in found if fault.drafter == index), None)
            if own is not None:
                what = "the token id" if own.is_token else "a count of"
                kind = FaultKind.TOKEN if own.is_token else FaultKind.COUNT
                guard.record.add(kind, f"propose() returned {what} {own.value}")
        news = tuple(fault for guard in self._guards for fault in guard.record.take())
        reports = tuple(report for observer in self._observers if (report := observer.end_step()) is not None)
        return DraftingReport(news, bool(self._guards) and self.num_off == len(self._guards), reports)
