"""Block drafters (DFlash, DSpark): all drafts of a step in one pass.

Slot p holds the drafter's keys and values of token p, computed from the target's hidden states of p. It is written only
for tokens that the target has computed and accepted. So a page's hash identifies the drafter's content, and pages are
shared with the target like those of a draft model:

    target computed in this step     c   c+1  ...  c+m-1          context is written to these slots
    the block then takes slots                            c+m  c+m+1  ...   (c+m is the last known token)

The keys and values of the block are stored after the context, and the next step overwrites them before it reads any.
Slots before `valid_from[row]` were never filled (the drafter skipped a step) or were evicted, and are not attended.

- A sliding layer is causal within its block if `layer_types` names it, and sees its whole block with `use_swa` or
  `sliding_window_non_causal`; `causal` or `is_causal` decides for all layers. A row at p sees nothing before p -
  window + 1.
- DSpark's Markov head adds a term to the logits of each draft that depends on the draft before it, left to right.
- `"min_draft_confidence": 0.3` leaves out the drafts of a request from the first draft on that DSpark's confidence head
  expects to be reached and accepted less often than this. The default, 0, leaves out none: the number of drafts is then
  chosen by measured acceptance and costs. Files without a confidence head are refused with this setting.
- Fewer drafts than `block_size` allows make a smaller block, which is not what the drafter was trained with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from outrider.cache.groups import LayerCache
from outrider.cache.kinds import Part, pages_for
from outrider.config import SpeculativeConfig
from outrider.core import Admission, Axis, Limits
from outrider.drafters.base import DraftBuild, Drafter, Drafts, HiddenReads, Step
from outrider.drafters.batches import committed_requests, drafting_rows
from outrider.drafters.draw import draw_drafts
from outrider.drafters.eagle import warn_beyond
from outrider.drafters.files import drafter_source
from outrider.drafters.view_of import ViewOf
from outrider.kernels import ops
from outrider.kernels.buffers import buffer, to_device
from outrider.kernels.drafting import AdmittedRows, BlockPasses, BlockRows, DrafterCacheState, DraftPass, Tables
from outrider.layers import LayeredModule, NothingAttends, StepContext
from outrider.mixers import BatchView, CachedLayers, ExactQueries, KeysFrom
from outrider.models.block import BlockHead, build_block
from outrider.models.block_config import Sight
from outrider.models.head import load_head

log = logging.getLogger("outrider")
MOST_LOGITS = 1 << 26  # numbers of logits that are made at once


class BlockDrafter(Drafter):
    name = "block"
    skip_reads_aux = False

    def __init__(self, head: BlockHead, max_drafts: int, min_confidence: float = 0.0) -> None:
        """min_confidence: a request gets no drafts from the first one on for which the confidence head gives a lower
        probability of being reached and accepted."""
        self.head, self.max_drafts, self.aux_layers = head, max_drafts, head.aux_layers
        # Beside auxiliary states it reads nothing. The last layer's stream, if it is one of them, is made of all token
        # rows or of none.
        self.reads_hidden = HiddenReads.ALL if head.target.num_layers in head.aux_layers else HiddenReads.NOTHING
        self.attention_layers = tuple(head.attention_layers)
        self.lookahead = max_drafts + head.first_row
        self._min_confidence = min_confidence

    def modules(self) -> list[LayeredModule]:
        return [self.head]

    def weight_bytes(self) -> int:
        return self.head.weight_bytes()

    def cache_layers(self) -> list[LayerCache]:
        """Return the cache of the drafter's layers. Each page also keeps the flag "valid": whether the drafter has
        filled all slots of the page, so that a prefix hit may use it."""
        first, *others = self.head.cache_layers()
        return [replace(first, page_parts=(Part("valid", (), 1, "bool"),)), *others]

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        self._cached, self._device, self._max_len = cached, device, limits.max_len
        self._groups = cached.groups
        self._state = DrafterCacheState(
            page_tokens=tuple(group.page_tokens for group in cached.groups), tail_group=0, first_position=0,
            max_len=limits.max_len,
            valid_from=buffer(limits, Axis.ROWS, dtype=torch.int64, device=device),
            filled=buffer(limits, Axis.ROWS, dtype=torch.int64, device=device),
            page_valid=cached.page_parts(self.attention_layers[0].index)["valid"],
        )
        self._admitted: list[Admission] = []

    # Admission: which slots of a prefix hit the drafter has filled

    def admit(self, admissions: list[Admission]) -> None:
        fresh = [admission.row for admission in admissions if not admission.computed]
        self._admitted += [admission for admission in admissions if admission.computed]
        if fresh:
            rows = to_device(fresh, torch.int64, self._device)
            self._state.valid_from.index_fill_(0, rows, 0)
            self._state.filled.index_fill_(0, rows, 0)

    def reset(self) -> None:
        self._admitted = []

    def fill_slots(self, view_of: ViewOf, *, is_cold: bool) -> None:
        """Do nothing. The slots of a prefix hit's tokens are in its pages already, if they were ever written."""
        admitted, self._admitted = self._admitted, []
        if not admitted:
            return
        view = view_of(admitted)
        computed = [a.computed for a in admitted] + [0] * (view.num_requests - len(admitted))
        needed = to_device([[group.kind.first_needed(count) for count in computed] for group in self._groups],
                           torch.int64, self._device)
        ops.plan_first_slots(AdmittedRows(view.rows, view.positions, view.live, needed), self._tables(view),
                             self._state, needs_tail=False, num_chained=0, is_filled=False)

    def skip(self, step: Step) -> None:
        """Note that the drafter has not computed the tokens of this step. Its cache then has a gap, so pages completed
        now cannot serve a prefix hit."""
        ops.forget_pages(committed_requests(step), self._tables(step.batch.padded), self._state)

    # Proposal

    def propose(self, step: Step) -> Drafts:
        view, head = step.batch.padded, self.head
        num_rows = step.num_wanted + head.first_row
        passes = ops.plan_block_passes(committed_requests(step), drafting_rows(step), self._tables(view), self._state,
                                       num_wanted=step.num_wanted, num_rows=num_rows)
        context = self._context_view(view, passes.context)
        head.write_context(head.context_states(step.hidden), StepContext(self._cached.bind(context), context.positions))
        block = StepContext(self._bind_block(view, passes.block, num_rows), passes.block.positions)
        hidden = head.forward(self._block_tokens(passes, num_rows), block)
        by_draft = hidden.view(view.num_requests, num_rows, -1)[:, head.first_row :].transpose(0, 1).contiguous()
        drafts = torch.empty_like(passes.keys.positions)  # [drafts, requests]
        levels = torch.empty_like(passes.keys.counts)
        counts = self._draw(step, passes, by_draft, drafts, levels)
        return Drafts(drafts.t(), counts, levels)

    def _block_tokens(self, passes: BlockPasses, num_rows: int) -> torch.Tensor:
        tokens = torch.full_like(passes.block.positions, self.head.config.mask_token).view(-1, num_rows)
        tokens[:, 0] = passes.anchors
        return tokens.view(-1)

    def _draw(self, step: Step, passes: BlockPasses, hidden: torch.Tensor, drafts: torch.Tensor,
              levels: torch.Tensor) -> torch.Tensor:
        """Draw all drafts from hidden [drafts, requests, hidden], left to right, and write their confidence levels to
        levels [requests]. Returns the number of drafts of each request."""
        head, keys = self.head, passes.keys
        num_drafts, num_requests, _ = hidden.shape
        at_once = max(1, MOST_LOGITS // max(1, num_requests * head.num_outputs))
        before, reached, counts = passes.anchors, torch.ones_like(keys.temperature), torch.zeros_like(keys.counts)
        state = None if head.markov is None else head.markov.first_state(hidden[0])
        for first in range(0, num_drafts, at_once):
            some = hidden[first : first + at_once]
            positions = keys.positions[first : first + at_once]
            logits = head.logits(some.flatten(0, 1), StepContext(NothingAttends(), positions.flatten())
                                 ).unflatten(0, some.shape[:2])
            for index, own in enumerate(logits, first):
                context = StepContext(NothingAttends(), keys.positions[index])
                if head.markov is not None and state is not None:
                    added, state = head.markov.addition(before, hidden[index], state, context)
                    own = own + added
                draw_drafts(own, keys, index, target_ids=head.target_ids, any_sampled=step.any_sampled,
                            out=drafts[index], levels=levels)
                if self._min_confidence > 0:
                    reached = reached * head.confidence_of(hidden[index], before, context)
                    counts += reached >= self._min_confidence  # never rises again, so that these are the first drafts
                before = drafts[index]
        return torch.minimum(counts, keys.counts) if self._min_confidence > 0 else keys.counts

    # Batches

    def _tables(self, view: BatchView) -> Tables:
        return tuple(view.page_tables[group.index] for group in self._groups)

    def _with_slots(self, view: BatchView, own: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        slots = list(view.token_slots)
        for group, each in zip(self._groups, own, strict=True):
            slots[group.index] = each
        return tuple(slots)

    def _context_view(self, view: BatchView, context: DraftPass) -> BatchView:
        """Return a view of the step's token rows for writing their slots. Only computed and accepted tokens are live in
        it."""
        return replace(
            view, positions=context.positions, lengths=context.lengths, live=context.live,
            lengths_int32=context.lengths_int32, live_int32=context.live_int32,
            token_slots=self._with_slots(view, context.slots),
        )

    def _bind_block(self, view: BatchView, block: BlockRows, num_rows: int) -> BlockLayers:
        """Bind each layer to a view of the block's rows that fits its attention pattern (causal or whole block,
        window)."""
        bound = {}
        for sight in dict.fromkeys(self.head.sights):
            make = self._causal_view if sight.is_causal else self._whole_view
            bound[sight] = self._cached.bind(make(view, block, num_rows, sight))
        return BlockLayers({layer.index: bound[sight] for layer, sight in zip(self.attention_layers, self.head.sights,
                                                                             strict=True)})

    def _causal_view(self, view: BatchView, block: BlockRows, num_rows: int, sight: Sight) -> BatchView:
        """Return a view of the blocks with causal attention: each row sees its request's context and the rows before
        it."""
        count, device = view.num_requests, block.positions.device
        starts = torch.arange(count + 1, device=device) * num_rows
        return replace(
            view, num_tokens=count * num_rows, queries=ExactQueries((num_rows,) * count),
            max_length=view.max_length.after(num_rows, self._max_len), query_starts=starts,
            query_starts_int32=starts.int(), lengths=block.lengths, lengths_int32=block.lengths.int(), live=block.live,
            live_int32=block.live.int(), token_ids=block.positions, positions=block.positions,
            request_of=_repeated(torch.arange(count, device=device), num_rows),
            token_slots=self._with_slots(view, block.slots),
            visible=KeysFrom(block.key_starts, block.key_starts.int()),
        )

    def _whole_view(self, view: BatchView, block: BlockRows, num_rows: int, sight: Sight) -> BatchView:
        """Return a view of the blocks for layers in which each row attends to its whole block. Every row becomes a
        request of its own with one query at the block's end, so that causal kernels let it see the whole block."""
        count, device = view.num_requests * num_rows, block.positions.device
        bound = view.max_length.after(num_rows, self._max_len)
        tables = list(view.page_tables)
        for group in self._groups:
            columns = pages_for(bound.tokens, group.page_tokens)
            tables[group.index] = _repeated(view.page_tables[group.index][:, :columns], num_rows)
        key_starts = _repeated(block.key_starts, num_rows)
        if sight.window is not None:
            key_starts = torch.maximum(key_starts, block.positions - sight.window + 1)
        starts = torch.arange(count + 1, device=device)
        return replace(
            view, num_requests=count, num_tokens=count, queries=ExactQueries((1,) * count), max_length=bound,
            rows=_repeated(view.rows, num_rows), query_starts=starts, query_starts_int32=starts.int(),
            lengths=block.row_lengths, lengths_int32=block.row_lengths.int(), live=block.row_live,
            live_int32=block.row_live.int(), token_ids=block.positions,
            positions=(block.row_lengths - 1).clamp_min(0), request_of=starts[:-1], page_tables=tuple(tables),
            token_slots=self._with_slots(view, block.slots), visible=KeysFrom(key_starts, key_starts.int()),
        )


class BlockLayers:
    """The layers of a block drafter, each bound to the view that fits its attention pattern."""

    def __init__(self, by_layer: Mapping[int, Any]) -> None:
        self._by_layer = by_layer

    def mixer(self, layer: int) -> Any:
        return self._by_layer[layer].mixer(layer)


def _repeated(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """Return [n * times, ..] the tensor with each entry of the first axis repeated `times` times in a row."""
    return tensor[:, None].expand(-1, times, *tensor.shape[1:]).reshape(-1, *tensor.shape[1:])


def block_drafter(config: SpeculativeConfig, build: DraftBuild) -> BlockDrafter:
    source, num_drafts = drafter_source(config, build), config.num_speculative_tokens
    head = build_block(source.reader(), build.target, first_layer=build.first_layer, max_drafts=num_drafts,
                       max_len=build.max_len, dtype=build.dtype, device=build.device)
    if config.min_draft_confidence > 0 and head.confidence is None:
        raise ValueError(f"speculative_config: min_draft_confidence is {config.min_draft_confidence}, and the drafter "
                         f"{source.name} has no confidence head: leave min_draft_confidence out")
    if head.sizes.max_positions < build.max_len:
        log.warning("the block drafter %s was made for %d positions and max_model_len is %d: it may guess badly beyond "
                    "them, which makes it slower there, never wrong",
                    source.name, head.sizes.max_positions, build.max_len)
    load_head(head, lambda: source, load_format=build.load_format, seed=build.seed,
              rounds_output=build.rounds_output)
    warn_beyond("block", head, num_drafts)
    return BlockDrafter(head, num_drafts, config.min_draft_confidence)
