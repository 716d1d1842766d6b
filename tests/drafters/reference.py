"""What a drafter should propose, computed naively: one request, no pages, everything from scratch for every draft.

Written from the checkpoints' own tensors in float64, with dense attention over the whole history. It shares the
target's forward (checked elsewhere against transformers) and the noise of the sampler with the engine, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from outrider.core.params import SamplingParams
from outrider.layers import StepContext
from outrider.models.base import Hidden, Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from outrider.sample.philox import gumbel
from tests.drafters.checkpoints import EPS, HEADS, KV_HEADS, THETA, Drafter
from tests.models.oracle import LOGIT_ROWS, DenseAttend

# Hidden states of slots, in order, with tokens and slot numbers; gives (logits, hidden to feed back) of the last.
Pair = tuple[torch.Tensor, torch.Tensor]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]


class Reference:
    def __init__(self, drafter: Drafter, target: Model) -> None:
        self.target, self.kind = target, drafter.method
        self.tensors = {name: t.double() if t.is_floating_point() else t for name, t in drafter.tensors.items()}
        self.config: dict[str, Any] = drafter.config
        if self.kind == "draft_model":
            self.draft_model = load_model(resolve(drafter.folder), dtype=torch.float64, device="cpu")
        self.target_ids = None
        if "d2t" in self.tensors:
            self.target_ids = torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]

    def drafts(self, known: Sequence[int], k: int, params: SamplingParams | None = None,
               valid_from: int = 0) -> list[int]:
        """What follows `known`. Slots before `valid_from` are left out, as if their tokens did not exist."""
        chosen: list[int] = []
        hidden = None if self.kind == "draft_model" else self.consumed(self.dense(self.target, list(known[:-1])))
        first = max(valid_from, 0 if hidden is None else 1)
        if hidden is not None:
            hidden = hidden[first - 1 :]  # slot p takes the hidden state of p - 1
        for index in range(k):
            tokens = torch.tensor([*known, *chosen][first:])
            slots = torch.arange(first, first + len(tokens))
            if hidden is None:
                final = self.draft_model.forward(tokens, StepContext(DenseAttend(self.draft_model), slots)).final
                logits = self.draft_model.logits(final[-1:], LOGIT_ROWS)
            else:
                logits, fed_back = self.forward(tokens, slots, hidden)
                hidden = torch.cat((hidden, fed_back))
            chosen.append(self.choose(logits, len(known) + index, params))
        return chosen

    def choose(self, logits: torch.Tensor, position: int, params: SamplingParams | None) -> int:
        if params is not None and params.temperature > 0:
            key = [torch.tensor([value]) for value in (params.seed or 0, 0, position)]
            noise = gumbel(*key, self.target_ids, logits.shape[1], torch.float64)
            logits = logits / params.temperature + noise
        best = int(logits.argmax())
        return best if self.target_ids is None else int(self.target_ids[best])

    def dense(self, model: Model, tokens: list[int]) -> Hidden:
        aux_layers = tuple(range(model.num_layers + 1))
        attend = DenseAttend(model)
        context = StepContext(attend, torch.arange(len(tokens)), history=attend.history(torch.tensor(tokens)))
        return model.forward(torch.tensor(tokens), context, aux_layers)

    # Heads

    def consumed(self, hidden: Hidden) -> torch.Tensor:
        if self.kind == "eagle":
            return hidden.final
        if self.kind == "mtp":
            return hidden.before_norm if self.is_gemma else hidden.final
        t = self.tensors
        ids = (self.config.get("eagle_config") or self.config)["eagle_aux_hidden_state_layer_ids"]
        streams = torch.cat([hidden.aux_states[i] for i in ids], dim=-1)
        if "input_norm.weight" in t:
            streams = norm(streams, t["input_norm.weight"])
        if "fc_norm.0.weight" in t:
            parts = streams.chunk(len(ids), dim=-1)
            streams = torch.cat([norm(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], dim=-1)
        return streams @ t["fc.weight"].T

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor) -> Pair:
        of_kind: dict[str, Forward] = {"eagle": self.eagle, "eagle3": self.eagle3, "mtp": self.mtp}
        logits, fed_back = of_kind[self.kind](tokens, slots - 1, hidden)
        return logits[-1:], fed_back[-1:]

    def eagle(self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> Pair:
        t = self.tensors
        fc, prefix = ("fc", "layers.0") if "fc.weight" in t else ("fusion_fc", "transformer")
        x = F.linear(torch.cat((self.embedded(tokens), hidden), dim=-1), t[f"{fc}.weight"], t.get(f"{fc}.bias"))
        x = self.halves(prefix, x, x, positions, THETA)
        return self.target.logits(x, LOGIT_ROWS), x

    def eagle3(self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> Pair:
        t = self.tensors
        prefix = "midlayer" if "midlayer.hidden_norm.weight" in t else "layers.0"
        normed = norm(hidden, t[f"{prefix}.hidden_norm.weight"])
        side_by_side = torch.cat((norm(self.embedded(tokens), t[f"{prefix}.input_layernorm.weight"]), normed), dim=-1)
        is_speculators = prefix == "layers.0"  # whose default is to norm before the residual
        x = self.halves(prefix, side_by_side, normed if is_speculators else hidden, positions, THETA)
        output = norm(x, t["norm.weight"])
        return output @ t["lm_head.weight"].T, output if self.config.get("norm_output") else x

    def mtp(self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> Pair:
        t, offset = self.tensors, 1.0 if self.is_gemma else 0.0
        embedded = self.target.embed_tokens.look_up(tokens)
        if self.is_gemma:  # as the tests' description says: zeroed at position 0, hidden state first
            embedded = embedded * (positions > 0)[:, None]
        parts = [norm(embedded, t["mtp.pre_fc_norm_embedding.weight"] + offset),
                 norm(hidden, t["mtp.pre_fc_norm_hidden.weight"] + offset)]
        x = torch.cat(parts[::-1] if self.is_gemma else parts, dim=-1) @ t["mtp.fc.weight"].T
        x = self.halves("mtp.layers.0", norm(x, t["mtp.layers.0.input_layernorm.weight"]), x, positions,
                        1_000_000.0 if self.is_gemma else 10_000.0)
        output = norm(x, t["mtp.norm.weight"] + offset)
        return self.target.logits(output, LOGIT_ROWS), x if self.is_gemma else output

    @property
    def is_gemma(self) -> bool:
        return type(self.target).__name__ == "Gemma3"

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tensors.get("embed_tokens.weight", self.target.embed_tokens.weight)[tokens]

    def halves(self, prefix: str, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor,
               theta: float) -> torch.Tensor:
        """Attention from x and the MLP, each added to the residual stream."""
        t = self.tensors
        q, k, v = (x @ t[f"{prefix}.self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = q.unflatten(1, (HEADS, -1)), k.unflatten(1, (KV_HEADS, -1)), v.unflatten(1, (KV_HEADS, -1))
        if f"{prefix}.self_attn.q_norm.weight" in t:
            q = norm(q, t[f"{prefix}.self_attn.q_norm.weight"])
            k = norm(k, t[f"{prefix}.self_attn.k_norm.weight"])
        q, k = rope(q, positions, theta), rope(k, positions, theta)
        out = torch.empty_like(q)
        for head in range(HEADS):
            scores = q[:, head] @ k[:, head * KV_HEADS // HEADS].T * q.shape[-1] ** -0.5
            scores = scores.masked_fill(positions[:, None] < positions, -torch.inf)
            out[:, head] = scores.softmax(dim=-1) @ v[:, head * KV_HEADS // HEADS]
        residual = residual + out.flatten(1) @ t[f"{prefix}.self_attn.o_proj.weight"].T
        y = norm(residual, t[f"{prefix}.post_attention_layernorm.weight"])
        gate, up = (y @ t[f"{prefix}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return residual + (F.silu(gate) * up) @ t[f"{prefix}.mlp.down_proj.weight"].T


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [tokens, heads, dim], halves rotated against each other."""
    dim = x.shape[-1]
    angles = positions[:, None, None] * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)
