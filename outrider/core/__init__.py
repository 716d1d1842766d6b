"""Plain data that the API front ends, the scheduler and the workers exchange: limits, batches, step results,
parameters, outputs. No torch."""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.core.any_output import Output, empty_output
    from outrider.core.class_head import ClassHead
    from outrider.core.drafter_faults import FaultRecord
    from outrider.core.hidden_params import HiddenReport, RequestParams
    from outrider.core.lengths import Bound, Settled
    from outrider.core.limits import NULL_PAGE, NULL_ROW, PAGE_TOKENS, Axis, Limits
    from outrider.core.outputs import RequestOutput
    from outrider.core.params import SamplingParams
    from outrider.core.row_end import RowEnd
    from outrider.core.step_messages import (
        NO_ADMISSION,
        Admission,
        CacheOrders,
        CheckpointWrite,
        DeltaReach,
        DraftOrders,
        Finish,
        HostDraft,
        PageChanges,
        PageWrite,
        RequestResult,
        ScheduledBatch,
        StepForm,
        StepMode,
        StepResult,
        TokenLogprobs,
    )
    from outrider.core.step_part import StepPart
    from outrider.core.uncaptured import Uncaptured
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Admission",
    "Axis",
    "Bound",
    "CacheOrders",
    "CheckpointWrite",
    "ClassHead",
    "DeltaReach",
    "DraftOrders",
    "FaultRecord",
    "Finish",
    "HiddenReport",
    "Output",
    "RequestParams",
    "HostDraft",
    "Limits",
    "NO_ADMISSION",
    "NULL_PAGE",
    "NULL_ROW",
    "PAGE_TOKENS",
    "PageChanges",
    "PageWrite",
    "RequestOutput",
    "RequestResult",
    "RowEnd",
    "SamplingParams",
    "ScheduledBatch",
    "Settled",
    "StepForm",
    "StepMode",
    "StepPart",
    "StepResult",
    "TokenLogprobs",
    "Uncaptured",
    "empty_output",
]
