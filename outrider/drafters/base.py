"""Drafter, the base class of drafters, and Step, which gives a drafter the tokens that a step of the target has just
accepted.

A drafter guesses the tokens that follow the step, for every request of the batch in one pass. A wrong guess costs time
and never changes the text: a draft is accepted only if the target's sampler picks the same token.
"""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outrider.cache.groups import LayerCache
from outrider.core import Admission, Limits
from outrider.kernels.accept import Accepted
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.layers import LayeredModule
from outrider.mixers import AttentionLayer, CachedLayers, ForwardBatch
from outrider.models.base import Hidden, Model

if TYPE_CHECKING:
    from outrider.drafters.view_of import ViewOf
    from outrider.layers import GivenRows


@dataclass(frozen=True)
class DraftBuild:
    """The target model and the engine's properties from which a drafter is made."""

    target: Model
    dtype: torch.dtype
    device: torch.device
    max_len: int
    load_format: str = "auto"
    seed: int = 0
    target_source: str | None = None  # the target's own files, for a drafter that is a module of its checkpoint
    keep_quantized: bool = False  # weights may stay in the format of their files
    rounds_output: bool = False  # a head may draft from a rounded copy of the target's output
    num_drafter_layers: int = 0  # attention layers of the drafters made before this one

    @property
    def first_layer(self) -> int:
        """Return the number of a drafter's first layer. Drafters' layers are numbered after the target's and each
        other's; a layer of the target may have several numbers, one for each kind of cache that it keeps."""
        last = max((claim.layer for claim in self.target.cache_layers()), default=-1)
        return max(self.target.num_layers, last + 1) + self.num_drafter_layers

    @property
    def is_outline(self) -> bool:
        """Whether the drafter is made on torch's meta device, without weights, to see whether it fits the target."""
        return self.device.type == "meta"


class HiddenReads(enum.IntEnum):
    """The kinds of a step's final hidden states that a drafter reads. The target need not compute the others."""

    NOTHING = 0
    LAST = 1  # the state of each request's last computed token, by `Step.last_final`
    ALL = 2


@dataclass(frozen=True)
class Step:
    """A step of the target whose accepted tokens are known, as drafters see it. Drafters only read it. Tensors marked
    [requests] have the padded number of requests; tensors marked [ROWS] are the state of all rows."""

    batch: ForwardBatch
    hidden: Hidden  # hidden states of the step's token rows, as far as the drafter reads them
    accepted: Accepted
    computed_before: torch.Tensor  # [requests] computed tokens when the step began
    num_computed: torch.Tensor  # [requests] tokens that the step computed: known ones and accepted drafts
    goes_on: torch.Tensor  # [requests] whether the request got a run and has not ended, so that drafts are wanted
    tokens: torch.Tensor  # [ROWS, LENGTH] known tokens, this step's run included
    known: torch.Tensor  # [ROWS]
    sampling: SamplingKeys  # of ROWS
    any_sampled: bool  # whether some request of the batch has a temperature
    num_wanted: int  # most drafts that a request may get
    first_logit: torch.Tensor  # [requests] logit row of the last known token, if it has one; its drafts follow
    given_rows: GivenRows | None = None  # vectors in place of embeddings, of the position after each token row's own

    def last_final(self, token_rows: torch.Tensor) -> torch.Tensor:
        """Return the final hidden state of each request's last computed token. token_rows: the token rows of these
        tokens."""
        return self.hidden.last_final(token_rows, self.first_logit + self.accepted.num_accepted)


@dataclass(frozen=True)
class Drafts:
    tokens: torch.Tensor  # [requests, step.num_wanted] int64
    counts: torch.Tensor  # [requests] int64, how many of the tokens are drafts; the others are ignored
    levels: torch.Tensor | None = None  # [requests] int64, how sure it is of each: see `core/draft_confidence.py`


RENAMED = {"taps": "aux_layers", "skip_reads_taps": "skip_reads_aux"}  # attributes of drafters, since version 0.1


class Drafter:
    """Base class of drafters. Override `propose`. The other methods are for drafters that have layers, read hidden
    states or keep state for each batch row.

    While the engine runs, only `drafters.guard.DrafterGuards` calls a drafter. A drafter that raises, or returns
    anything other than drafts, loses its drafts of that step; after some faults it is switched off."""

    name = "custom"
    max_drafts = 0  # most drafts it can make; the engine's num_speculative_tokens
    aux_layers: tuple[int, ...] = ()  # target layers whose hidden states it reads
    skip_reads_aux = True  # or only `propose` does: then steps without drafts record none
    reads_hidden = HiddenReads.ALL  # beside the states of aux_layers
    attention_layers: tuple[AttentionLayer, ...] = ()  # its own layers, numbered after the target's
    lookahead = 0  # slots past the computed tokens that it writes

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept the attribute names of version 0.1 in subclasses."""
        super().__init_subclass__(**options)
        for old, name in RENAMED.items():
            if old in vars(cls):
                warnings.warn(f"{cls.__name__}.{old} is called {name} now: rename it", FutureWarning, stacklevel=2)
                setattr(cls, name, vars(cls)[old])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RENAMED:
            warnings.warn(f"{type(self).__name__}.{name} is called {RENAMED[name]} now: rename it", FutureWarning,
                          stacklevel=2)
        super().__setattr__(RENAMED.get(name, name), value)

    def cache_layers(self) -> list[LayerCache]:
        """Return the cache that the drafter's layers need. Data that is kept once for each page is declared here too
        (`LayerCache.page_parts`). It is stored in the page, and the drafter finds it in `CachedLayers.page_parts`."""
        return []

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        """Called once, before the first step. Gives the drafter the cache of its layers. `limits` has the sizes for
        state that the drafter keeps for each batch row."""

    def admit(self, admissions: list[Admission]) -> None:
        """Called when requests take rows, before the step that first schedules them."""

    def reset(self) -> None:
        """Forget the state of all rows. Called when no row holds a request."""

    def fill_slots(self, view_of: ViewOf, *, is_cold: bool) -> None:
        """Called before a step, when the page tables of the rows just admitted are written. Fill those cache slots of
        the rows that their steps will not fill. `view_of(admissions)` makes the batch for this. is_cold: the step makes
        no proposal."""

    def propose(self, step: Step) -> Drafts:
        """Guess up to `step.num_wanted` tokens for every request. The method must not read device data on the host.
        Drafts for requests that have ended are ignored."""
        raise NotImplementedError

    def skip(self, step: Step) -> None:
        """Called for a step in which this drafter does not propose. Its state of the rows then lacks this step's
        tokens."""

    def modules(self) -> list[LayeredModule]:
        """Return the models and heads that the drafter runs."""
        return []

    def weight_bytes(self) -> int:
        return 0
