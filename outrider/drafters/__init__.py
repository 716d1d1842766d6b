"""Drafters: each guesses the next tokens of a batch's requests. No drafter can change the text.

A drafter's cache lies in the same pages as the target's. Slot p of it depends on tokens up to p (a head consumes the
hidden state of p - 1 and token p), so a page's hash identifies the drafter's content too. The hidden state of a page's
last token, and whether the drafter has filled all slots of the page, are parts of the page itself
(`LayerCache.page_parts`), so that drafting resumes after a prefix hit without recomputing anything
(`drafters/autoregressive.py`; `drafters/chained.py` for checkpoints with several prediction modules, each of which
consumes the one before it). A block drafter's slot p is made of the target's hidden states of p alone
(`drafters/block.py`), so it needs no state of the page before. `drafters/batches.py` builds the batches of all drafting
passes; `kernels/drafting.py` plans the slots of all passes at once.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.drafters.base import DraftBuild, Drafter
    from outrider.drafters.registry import make_drafter
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["DraftBuild", "Drafter", "make_drafter"]
