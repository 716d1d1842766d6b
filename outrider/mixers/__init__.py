"""Mixers: the parts of layers in which the tokens of a request meet, over a batch and its cache.

`paged` is attention over keys and values in pages, `recurrent` carries a state per row. Each has its backends.
"""

from outrider.mixers.batch import BatchView, ExactQueries, ForwardBatch, KeysFrom
from outrider.mixers.cached import Attend, CachedLayers
from outrider.mixers.paged.base import AttentionLayer, HeadNorms, PagedLayer
from outrider.mixers.recurrent.base import Gates, MixerParams, RecurrentLayer, RecurrentMixer, Scanned, Stepped
from outrider.mixers.recurrent.checkpoint_pages import RecurrentState

__all__ = [
    "Attend", "AttentionLayer", "BatchView", "CachedLayers", "ExactQueries", "ForwardBatch", "Gates",
    "HeadNorms", "KeysFrom", "MixerParams", "PagedLayer", "RecurrentLayer", "RecurrentMixer", "RecurrentState",
    "Scanned", "Stepped",
]  # fmt: skip
