"""Draft heads with gradients, and the head that learns from the traffic while it serves. See docs/training.md.

With `adapt_drafter` an EAGLE-3 head learns while it serves (`learning/`, training.md). `DrafterGuards` shows each
committed step to a `DrafterLearner`, which copies the accepted tokens' residual streams into a ring
(`learning/traffic.py`, part of a captured step). The batch says which rows requests have left, and with how many
served tokens (`ScheduledBatch.ends`): these close the ring's segments, or empty them after an abort. The trainer's
thread reads closed segments alone. It offers better weights; the thread of steps copies them over the serving ones in
`begin_step`, which comes before each step and after all earlier ones, so that captured steps find them where they
were. Captures, sleep and updates of weights wait for the trainer's piece of work, and it waits for them.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.learning.learner import DrafterLearner, LearningSettings, count_served_tokens
    from outrider.learning.served_head import ServedHead
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["DrafterLearner", "LearningSettings", "ServedHead", "count_served_tokens"]
