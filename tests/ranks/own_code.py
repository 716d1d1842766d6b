"""Code of users that differs from rank to rank: what it does on rank 0 must count, and nothing that others do."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.logits_processors import AdapterLogitsProcessor, RequestLogitsProcessor

NAME = multiprocessing.current_process().name
RANK = int(NAME.removeprefix("outrider-worker-")) if NAME.startswith("outrider-worker-") else 0


class RankDrafter(Drafter):
    """Drafts the last token again on rank 0, and something else, or an exception, on others."""

    name = "of_rank"

    def __init__(self, num_drafts: int, target: Any) -> None:
        self.max_drafts = num_drafts
        self._num_calls = 0

    def propose(self, step: Step) -> Drafts:
        self._num_calls += 1
        if RANK and self._num_calls > 5:
            raise ArithmeticError("no drafts on this rank")
        rows = step.batch.padded.rows
        last = step.tokens[rows, (step.known[rows] - 1).clamp_min(0)]
        tokens = (last + RANK)[:, None].repeat(1, step.num_wanted)
        return Drafts(tokens, torch.full_like(rows, step.num_wanted - RANK))


class NoDrafterOnRank1(RankDrafter):
    """Cannot be made on one rank, as when a file is missing there."""

    def __init__(self, num_drafts: int, target: Any) -> None:
        super().__init__(num_drafts, target)
        if RANK == 1:
            raise FileNotFoundError("weights.bin is missing")


class RankProcessor(AdapterLogitsProcessor):
    """Favours other tokens on every rank, and fails on rank 1 after some."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if RANK and len(output_ids) > 6:
                raise ArithmeticError("no logits on this rank")
            logits[10 + RANK + len(output_ids)] += 50
            return logits

        return process
