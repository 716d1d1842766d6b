"""The Markov head of DSpark drafters: it adds to the logits of a draft a term that depends on the token before it.

The term has a low rank: it is the row of `markov_w1` for the token before, times `markov_w2`. There are two variants:
in one the block's hidden state gates the row, in the other a small recurrent state along the block replaces the row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.layers import Embedding, Linear, Module, StepContext
from outrider.models.block_config import MarkovSizes


class MarkovHead(Module):
    def __init__(self, sizes: MarkovSizes, *, vocab_size: int, num_outputs: int, hidden_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        """vocab_size: the size of the target's vocabulary, for the tokens before drafts. num_outputs: the size of the
        drafter's vocabulary, for the drafts."""
        rank, made = sizes.rank, {"dtype": dtype, "device": device}
        self.rank, self.kind = rank, sizes.kind
        self.before = Embedding(vocab_size, rank, dtype=dtype, device=device)
        self.output = Linear(rank, num_outputs, bias=False, dtype=dtype, device=device)
        self.gate = Linear(hidden_size + rank, rank, bias=True, **made) if sizes.kind == "gated" else None
        self.joint = Linear(2 * rank + hidden_size, 3 * rank, bias=True, **made) if sizes.kind == "rnn" else None

    def parts(self) -> Sequence[tuple[str, Module]]:
        optional = {"gate_proj": self.gate, "joint_proj": self.joint}
        return [("markov_w1", self.before), ("markov_w2", self.output),
                *((name, part) for name, part in optional.items() if part is not None)]

    def first_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the recurrent state [requests, rank] before the first draft. Kinds without a recurrence ignore it."""
        return hidden.new_zeros(len(hidden), self.rank)

    def addition(self, tokens: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor,
                 context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the term for the logits of the drafts after `tokens` [requests]. `hidden`: the hidden states of their
        rows of the block. Returns ([requests, outputs], the state for the next draft)."""
        x = self.before.look_up(tokens)
        if self.gate is not None:
            x = torch.sigmoid(self.gate(torch.cat((hidden, x), dim=-1), context)) * x
        elif self.joint is not None:
            gate, candidate, x = self.joint(torch.cat((state, x, hidden), dim=-1), context).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            x = torch.tanh(x)
        return self.output.wide(x.contiguous(), context), state
