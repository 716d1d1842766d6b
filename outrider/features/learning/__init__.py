"""A drafter that learns from the traffic while it serves. See docs/training.md.

With `adapt_drafter` an EAGLE-3 head learns while it serves. `DrafterGuards` shows each committed step to a
`DrafterLearner` (a DraftObserver), which copies the accepted tokens' residual streams into a ring (`traffic.py`, part
of a captured step). The batch says which rows requests have left, and with how many served tokens
(`ScheduledBatch.ends`). The learner then closes the rows' segments of the ring, or empties them after an abort. The
trainer's thread reads closed segments only. When it has better weights, the thread of steps copies them over the
serving ones in `begin`, which is called between steps. The weights keep their addresses, so captured steps stay valid.
Captures, sleep and updates of weights never run at the same time as the trainer: each waits for the other.
"""
