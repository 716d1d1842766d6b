"""BatchBuilder: collects the requests that the scheduler adds to one batch, and makes a ScheduledBatch of them.

It advances the upper bounds of the requests' lengths. The scheduler decides which requests and how many tokens to add.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.cache.checkpoints import StateProgress
from outrider.core import Admission, ScheduledBatch, StepForm
from outrider.core.feature_parts import BatchPart
from outrider.core.step_messages import CacheOrders, DraftOrders, StepMode
from outrider.sched.request import Request


class BatchBuilder:
    """Collects the requests of one batch, and advances the upper bounds of their lengths."""

    def __init__(self, step: int, generation: int = 0) -> None:
        self.step, self._generation = step, generation
        # A column of each of its requests' fields: hundreds of requests are added in every step.
        self.requests: list[Request] = []
        self.num_drafts: list[int] = []
        self.num_pending: list[int] = []  # accepted drafts of each request that wait to be folded, at most
        self._before: list[int] = []  # bounds before the step
        # Of prompts only, which come after the requests that decode.
        self._num_known_of_prompts: list[int] = []
        self._samples_of_prompts: list[bool] = []

    @property
    def is_empty(self) -> bool:
        return not self.requests

    @property
    def request_ids(self) -> set[int]:
        return {request.id for request in self.requests}

    def add_decoding(self, request: Request, num_drafts: int, bound: int) -> None:
        """Add a request that decodes: one known token and `num_drafts` drafts, with a sample after each. bound: the
        most computed tokens of the request after the step. Called before `add_prompt`."""
        own = request.bound
        self.requests.append(request)
        self.num_drafts.append(num_drafts)
        self.num_pending.append(request.num_pending)
        self._before.append(own.at_most)
        request.num_pending = num_drafts
        own.at_most = bound
        request.unsettled += 1 + num_drafts
        request.in_flight_samples += 1

    def add_prompt(self, request: Request, num_known: int, samples: bool, bound: int) -> None:
        """Add the next `num_known` known tokens of a request, such as a chunk of its prompt. samples: whether a token
        is sampled after the last of them."""
        self._num_known_of_prompts.append(num_known)
        self._samples_of_prompts.append(samples)
        self.add_decoding(request, 0, bound)
        request.unsettled += num_known - 1
        request.in_flight_samples -= not samples

    @property
    def only_decodes(self) -> bool:
        """Whether every request of the batch computes one known token and samples the next one."""
        return all(self._samples_of_prompts) and max(self._num_known_of_prompts, default=1) == 1

    @property
    def _num_decoding(self) -> int:
        return len(self.requests) - len(self._num_known_of_prompts)

    @property
    def _num_known(self) -> list[int]:
        return [1] * self._num_decoding + self._num_known_of_prompts

    @property
    def _samples(self) -> list[bool]:
        return [True] * self._num_decoding + self._samples_of_prompts

    @property
    def form(self) -> StepForm:
        """Whether the step runs whole or split. It is split if a request samples with masks, because the host writes
        masks before the sampler runs."""
        needs_masks = any(samples and request.input.is_masked
                          for request, samples in zip(self.requests, self._samples, strict=True))
        return StepForm.SPLIT if needs_masks else StepForm.WHOLE

    @property
    def progress(self) -> dict[int, StateProgress]:
        """Return how many tokens the stored recurrent state of each request covers before and after the step. Tokens
        that were known at admission are certain. Drafts enter the state only after the step that checks them."""
        progress: dict[int, StateProgress] = {}
        for request, known, before in zip(self.requests, self._num_known, self._before, strict=True):
            sure = min(request.admitted_len, before)  # computed when the step begins, whatever is in flight
            least = max(request.settled.at_least, sure) + known
            progress[request.id] = StateProgress(request.folded, max(request.folded, sure), least, before + known)
        return progress

    def build(self, admissions: Iterable[Admission], cache: CacheOrders, drafting: DraftOrders, form: StepForm,
              parts: tuple[BatchPart, ...] = ()) -> ScheduledBatch:
        requests = self.requests
        return ScheduledBatch(
            step=self.step,
            request_ids=[r.id for r in requests],
            epochs=[r.epoch for r in requests],
            rows=[r.row for r in requests],
            num_known=self._num_known,
            num_drafts=self.num_drafts,
            samples=self._samples,
            bounds=[r.bound.at_most for r in requests],
            admissions=list(admissions),
            cache=cache,
            drafting=drafting,
            mode=StepMode(self._generation, form),
            parts=parts,
        )
