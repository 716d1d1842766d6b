"""Layers that keep a state per row: Mamba-2, gated delta and KDA.

A Mamba-2, gated-delta or KDA layer (a gated delta rule in which every key channel decays by itself) keeps one state
per row, megabytes of float32, which is never a page and never copied; a short convolution (LFM2, the n-gram
embeddings of Qwen4-Exp) keeps its last inputs alone. A step reads it once and writes it once, for any number of
drafts (`mixers/recurrent/torch_backend.py` is the specification; `kernels/gpu/recurrent` and
`kernels/gpu/gated_delta` do the same on a GPU):

    row's state   | accepted drafts of the last step | known tokens | drafts of this step
    covers        | folded from the row's window     | applied      | run, not stored: their inputs are the new window
                                                        state stored ^

A rejected draft was never in the state, so there is nothing to undo. For prefix hits the state is copied to a
*checkpoint*, a list of pages of the common pool, when a row is exactly at a page boundary:

- at multiples of `checkpoint_interval`, before the prompt's end, and at the prompt's latest boundary;
- where prompts branch: if a new request finds attention pages beyond the last known state, the next request that
  computes across that boundary keeps a state there (`PrefixLookup.find_common`), one at a time. A common prefix of any
  length is computed at most twice, and once if the requests arrive together.

The step reports the checkpoints it wrote, and only those are published (`cache/checkpoints.py`). A checkpoint that a
step writes for certain is promised, so that a request can begin from it in the next step. On a GPU the kernel that
holds the state writes it to those pages. Checkpoints are evicted like other pages. A model whose layers are all
recurrent has one group without layers: its pages keep nothing of their tokens (`cache/kinds/marker.py`), and prefixes
are counted and shared by them as in other models.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.kernels.recurrent import CheckpointTargets
    from outrider.mixers.recurrent.recurrent_mixer import NoRecurrentStep, RecurrentStep
    from outrider.mixers.recurrent.recurrent_rows import RecurrentRows
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["CheckpointTargets", "NoRecurrentStep", "RecurrentRows", "RecurrentStep"]
