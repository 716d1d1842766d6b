"""A Gemma 4 assistant as drafter: it reads the target's keys and values, and has no cache.

The assistant has query-only layers, each of which reads the keys and values of one of the target's groups. All drafts
of a step are guessed from one place: the query follows the last computed token and sees that token's context.
Implementations differ only in the query's rope position, which is the same for all drafts:

    computed tokens   0 .. n-1      have keys and values, in both groups
    last known token  n             gives the embedding; it has no keys and values yet
    "sampled"         position n    transformers uses this position
    "computed"        position n-1  other implementations use this one

So one batch view serves every draft. The drafter writes no cache and computes no prompt, and may miss steps.

`assistant_position` chooses between the two; `"sampled"` is the default. A checkpoint must be run as it was trained:
the tests train a small pair with the first rule, and with 3 drafts it yields 3.88 tokens per step with that rule and
1.01 with the other. Published checkpoints have not been measured here. The drafts of transformers also depend on
history: right after a prompt or a fully accepted draft its assistant sees one more sliding key. Here it always sees the
window of the last computed token."""

from __future__ import annotations

import torch

from outrider.config import SpeculativeConfig
from outrider.core import Limits
from outrider.drafters.autoregressive import NetworkDrafter
from outrider.drafters.base import DraftBuild, Drafts, HiddenReads, Step
from outrider.drafters.batches import DraftingBatches, committed_requests, drafting_rows
from outrider.drafters.files import drafter_source
from outrider.kernels import ops
from outrider.kernels.drafting import ReadingPass
from outrider.layers import StepContext
from outrider.mixers import CachedLayers
from outrider.models.gemma4_assistant import Gemma4Assistant, build_assistant
from outrider.models.head import load_head


class AssistantDrafter(NetworkDrafter):
    """A drafter without cache and without state of batch rows, so that it may miss steps."""

    reads_hidden = HiddenReads.LAST

    def __init__(self, assistant: Gemma4Assistant, max_drafts: int, position: str = "sampled") -> None:
        super().__init__("gemma4_assistant", assistant, max_drafts)
        self._behind = {"sampled": 1, "computed": 2}[position]  # distance from the rope position to the known length

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        self._cached, self._max_len = cached, limits.max_len
        self._batches = DraftingBatches(cached.groups, limits, device)

    def propose(self, step: Step) -> Drafts:
        reading = self.reading_pass(step)
        keys, tokens, positions = reading.keys, reading.tokens, reading.rope_positions
        context = StepContext(self._cached.bind(self._batches.reading(step, reading)), positions)
        drafts, levels = torch.empty_like(keys.positions), torch.empty_like(keys.counts)
        feedback = step.last_final(keys.last)
        for index in range(step.num_wanted):
            output, feedback = self.network.forward(tokens, feedback, context)
            self._draw(step, keys, output, index, drafts, levels)
            tokens = drafts[index]
        return Drafts(drafts.t(), keys.counts, levels)

    def reading_pass(self, step: Step) -> ReadingPass:
        return ops.plan_reading_pass(committed_requests(step), drafting_rows(step), num_wanted=step.num_wanted,
                                     max_len=self._max_len, behind=self._behind)


def assistant_drafter(config: SpeculativeConfig, build: DraftBuild) -> AssistantDrafter:
    source = drafter_source(config, build)
    assistant = build_assistant(source.reader(), build.target, first_layer=build.first_layer, max_len=build.max_len,
                                dtype=build.dtype, device=build.device)
    load_head(assistant, lambda: source, load_format=build.load_format, seed=build.seed)
    return AssistantDrafter(assistant, config.num_speculative_tokens, config.assistant_position)
