"""Mixers: the parts of layers in which the tokens of a request exchange information (attention, recurrence), over a
batch and its cache.

`paged` is attention over keys and values in pages, `latent` attention over one compressed vector per token, `indexed`
attention to the chosen blocks of a context; `recurrent` keeps one state per row.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.mixers.batch import BatchView, ExactQueries, ExtraKeys, ForwardBatch, KeysFrom
    from outrider.mixers.cached import Attend, CachedLayers, WantedRows
    from outrider.mixers.indexed.indexed_mixer import BlockChoice, BlockInputs, BoundIndexedLayer, IndexedLayer
    from outrider.mixers.latent.latent_mixer import (
        AttendsTo,
        BoundLatentLayer,
        EveryPosition,
        IndexedPositions,
        LatentLayer,
        LatentNorms,
        PooledPositions,
        SharedPositions,
    )
    from outrider.mixers.paged.backend import AttentionLayer, HeadNorms, PagedLayer
    from outrider.mixers.recurrent.checkpoint_pages import RecurrentState
    from outrider.mixers.recurrent.recurrent_mixer import (
        Gates,
        MixerParams,
        NoRecurrentStep,
        RecurrentLayer,
        RecurrentMixer,
        RecurrentStep,
        ScanOutput,
        StepOutput,
    )
    from outrider.mixers.recurrent.recurrent_rows import RecurrentRows
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Attend", "AttendsTo", "AttentionLayer", "BatchView", "BoundIndexedLayer", "BoundLatentLayer", "CachedLayers",
    "EveryPosition", "ExactQueries", "ExtraKeys", "ForwardBatch", "Gates", "HeadNorms", "IndexedLayer",
    "IndexedPositions", "KeysFrom", "LatentLayer", "LatentNorms", "MixerParams", "NoRecurrentStep", "PagedLayer",
    "PooledPositions", "RecurrentLayer", "RecurrentMixer", "RecurrentRows", "RecurrentState", "RecurrentStep",
    "ScanOutput", "SharedPositions", "StepOutput", "BlockChoice", "BlockInputs", "WantedRows",
]
