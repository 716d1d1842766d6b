"""Random DFlash and DSpark drafters for tiny targets, in the forms of their publishers and of speculators, and what
they should propose, computed naively: one request, no pages, the whole context from scratch for every proposal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from outrider.core.params import SamplingParams
from outrider.models.base import Model
from tests.drafters.checkpoints import EPS, THETA, Drafter, Shapes, random_tensors, write
from tests.drafters.checkpoints import HEADS as NUM_HEADS
from tests.drafters.checkpoints import KV_HEADS as NUM_KV_HEADS
from tests.drafters.reference import Reference, norm, rope
from tests.models.oracle import LOGIT_ROWS

DRAFT_SHARE = 0.4  # of the target's tokens, in a reduced vocabulary
WINDOW = 20
FULL, SLIDING = "full_attention", "sliding_attention"


class BlockForm:
    """One published form: config and tensors for a target."""

    def __init__(self, name: str, target: Model, head_dim: int) -> None:
        self.target, self.hidden, self.vocab = target, target.hidden_size, target.vocab_size
        self.layer: dict[str, Any] = {
            "model_type": "qwen3", "hidden_size": self.hidden, "intermediate_size": 64,
            "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS, "num_hidden_layers": 2,
            "vocab_size": self.vocab, "max_position_embeddings": 256, "rms_norm_eps": EPS, "rope_theta": THETA,
            "hidden_act": "silu", "head_dim": head_dim, "layer_types": [FULL, FULL],
        }
        self.head_dim, self.mask = head_dim, self.vocab - 3
        self.config, more, self.num_outputs = getattr(self, f"_{name}")()
        self.shapes = self._shapes(len(self._ids())) | more

    def _ids(self) -> list[int]:
        nested = self.config.get("dflash_config", {})
        return self.config.get("aux_hidden_state_layer_ids") or self.config.get("target_layer_ids") or nested[
            "target_layer_ids"]

    def _shapes(self, num_aux: int) -> Shapes:
        shapes: Shapes = {"fc.weight": (self.hidden, num_aux * self.hidden), "hidden_norm.weight": (self.hidden,),
                          "norm.weight": (self.hidden,)}
        for index in range(2):
            prefix, q, kv = f"layers.{index}", NUM_HEADS * self.head_dim, NUM_KV_HEADS * self.head_dim
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (size, self.hidden)
            hidden, head = self.hidden, self.head_dim
            shapes |= {
                f"{prefix}.self_attn.o_proj.weight": (hidden, q), f"{prefix}.mlp.up_proj.weight": (64, hidden),
                f"{prefix}.mlp.gate_proj.weight": (64, hidden), f"{prefix}.mlp.down_proj.weight": (hidden, 64),
                f"{prefix}.input_layernorm.weight": (hidden,), f"{prefix}.self_attn.q_norm.weight": (head,),
                f"{prefix}.post_attention_layernorm.weight": (hidden,), f"{prefix}.self_attn.k_norm.weight": (head,),
            }
        return shapes

    def _dflash(self) -> tuple[dict[str, Any], Shapes, int]:
        """As z-lab's: everything of the vocabulary is the target's, rows see their whole block."""
        nested = {"mask_token_id": self.mask, "target_layer_ids": [0, self.target.num_layers - 1, -1]}
        config = self.layer | {"architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": nested,
                               "num_target_layers": self.target.num_layers, "tie_word_embeddings": True}
        return config, {}, self.vocab

    def _dflash_sliding(self) -> tuple[dict[str, Any], Shapes, int]:
        """As for Gemma 4: layers of both kinds, of which the sliding one is causal within the block."""
        config, _, outputs = self._dflash()
        return config | {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}, {}, outputs

    def _dflash_wide_windows(self) -> tuple[dict[str, Any], Shapes, int]:
        """As MiMo's: all layers slide, and none is causal."""
        config, _, outputs = self._dflash()
        nested = config["dflash_config"] | {"use_swa": True, "swa_window_size": WINDOW}
        return {k: v for k, v in config.items() if k != "layer_types"} | {"dflash_config": nested}, {}, outputs

    def _dflash_speculators(self) -> tuple[dict[str, Any], Shapes, int]:
        """A reduced vocabulary, its own embedding."""
        outputs = int(self.vocab * DRAFT_SHARE)
        layer = self.layer | {"layer_types": [FULL, SLIDING], "sliding_window": WINDOW}
        config = {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "draft_vocab_size": outputs,
            "transformer_layer_config": layer, "block_size": 6, "mask_token_id": self.mask,
            "aux_hidden_state_layer_ids": [1, 2], "sliding_window_non_causal": False, "sample_from_anchor": False,
            "target_hidden_size": None,
            "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": 5}]},
        }
        return config, {"lm_head.weight": (outputs, self.hidden), "embed_tokens.weight": (self.vocab, self.hidden)
                        }, outputs

    def _dspark(self) -> tuple[dict[str, Any], Shapes, int]:
        """As DeepSeek's: the anchor's row predicts the first draft; embedding and output repeated in the file."""
        config = self.layer | {
            "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": self.mask, "num_anchors": 512,
            "target_layer_ids": [0, 1], "num_target_layers": self.target.num_layers, "markov_rank": 6,
            "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
        }
        return config, self._markov(6, self.vocab, confidence=6), self.vocab

    def _dspark_gated(self) -> tuple[dict[str, Any], Shapes, int]:
        config, _, outputs = self._dspark()
        more = self._markov(6, outputs, confidence=0) | {
            "markov_head.gate_proj.weight": (6, self.hidden + 6), "markov_head.gate_proj.bias": (6,)}
        return config | {"markov_head_type": "gated", "confidence_head_with_markov": False}, more, outputs

    def _dspark_speculators(self) -> tuple[dict[str, Any], Shapes, int]:
        """DFlash's layout, a recurrent Markov head, no confidence head."""
        config, more, outputs = self._dflash_speculators()
        config |= {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "markov_rank": 5,
                   "markov_head_type": "rnn", "enable_confidence_head": False, "confidence_head_with_markov": True}
        more |= {"markov_head.markov_w1.weight": (self.vocab, 5), "markov_head.markov_w2.weight": (outputs, 5),
                 "markov_head.joint_proj.weight": (15, 10 + self.hidden), "markov_head.joint_proj.bias": (15,)}
        return config, more, outputs

    def _markov(self, rank: int, outputs: int, confidence: int) -> Shapes:
        return {"markov_head.markov_w1.weight": (self.vocab, rank), "markov_head.markov_w2.weight": (outputs, rank),
                "confidence_head.proj.weight": (1, self.hidden + confidence), "confidence_head.proj.bias": (1,)}


FORMS = ("dflash", "dflash_sliding", "dflash_wide_windows", "dflash_speculators", "dspark", "dspark_gated",
         "dspark_speculators")


def make_block(form: str, target: Model, folder: Path, head_dim: int = 8) -> Drafter:
    made = BlockForm(form, target, head_dim)
    tensors = random_tensors(made.shapes)
    if made.num_outputs < made.vocab:
        order = torch.randperm(made.vocab, generator=torch.Generator().manual_seed(9))
        ids = order[: made.num_outputs].sort().values
        tensors["d2t"], tensors["t2d"] = ids - torch.arange(len(ids)), torch.isin(torch.arange(made.vocab), ids)
    elif form == "dspark":  # repeats the target's
        tensors["embed_tokens.weight"] = target.embed_tokens.weight.float()
        tensors["lm_head.weight"] = target.lm_head.format.dense().float().clone()
    return write("block", folder, made.config, tensors)


class BlockReference(Reference):
    """What a block drafter proposes after `known`."""

    def __init__(self, drafter: Drafter, target: Model) -> None:
        super().__init__(drafter, target)
        layer = self.config.get("transformer_layer_config", self.config)
        self.head_dim, nested = layer["head_dim"], self.config.get("dflash_config", {})
        self.mask = self.config.get("mask_token_id", nested.get("mask_token_id"))
        ids = self.config.get("target_layer_ids", nested.get("target_layer_ids"))
        self.aux_layers = self.config["aux_hidden_state_layer_ids"] if ids is None else [i + 1 for i in ids]
        kinds = layer.get("layer_types", [FULL, FULL])
        is_wide = bool(nested.get("use_swa"))
        self.windows = [WINDOW if is_wide or kind == SLIDING else None for kind in kinds]
        self.causal = [kind == SLIDING for kind in kinds]
        self.first_row = int("Qwen3DSparkModel" not in self.config["architectures"])

    def drafts(self, known: Sequence[int], k: int, params: SamplingParams | None = None,
               valid_from: int = 0, num_rows: int | None = None) -> list[int]:
        """num_rows: rows of the block, of which some may be left out at the end of the model's length."""
        return self.drafts_with_confidence(known, k, params, valid_from, num_rows)[0]

    def drafts_with_confidence(self, known: Sequence[int], k: int, params: SamplingParams | None = None,
                               valid_from: int = 0, num_rows: int | None = None) -> tuple[list[int], list[float]]:
        t, p = self.tensors, len(known) - 1
        hidden = self.dense(self.target, list(known[:-1]))
        streams = torch.cat([hidden.aux_states[i] for i in self.aux_layers], dim=-1)
        context = norm(streams @ t["fc.weight"].T, t["hidden_norm.weight"])[valid_from:]
        rows = k + self.first_row if num_rows is None else num_rows
        block = torch.tensor([known[-1], *[self.mask] * (rows - 1)])
        x = self.own_embedding(block)
        places = torch.arange(valid_from, p + rows)
        for index, (window, causal) in enumerate(zip(self.windows, self.causal, strict=True)):
            x = self.layer(f"layers.{index}", x, context, places, window, causal)
        x = norm(x, t["norm.weight"])[self.first_row :]
        logits = x @ t["lm_head.weight"].T if "lm_head.weight" in t else self.target.logits(x, LOGIT_ROWS)
        chosen, confidences, before = [], [], known[-1]
        state = torch.zeros(t["markov_head.markov_w1.weight"].shape[1] if self.has_markov else 0, dtype=torch.float64)
        for index in range(k):
            own, state = self.biased(logits[index], before, x[index], state)
            confidences.append(self.confidence(x[index], before))
            before = self.choose(own[None], len(known) + index, params)
            chosen.append(before)
        return chosen, confidences

    @property
    def has_markov(self) -> bool:
        return "markov_head.markov_w1.weight" in self.tensors

    def own_embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.tensors.get("embed_tokens.weight")
        target = self.target.embed_tokens
        return target.look_up(tokens) if own is None or torch.equal(own, target.weight) else own[tokens]

    def layer(self, prefix: str, x: torch.Tensor, context: torch.Tensor, places: torch.Tensor, window: int | None,
              causal: bool) -> torch.Tensor:
        """places: positions of the context's tokens and of the block's rows."""
        t, rows = self.tensors, len(x)
        y = norm(x, t[f"{prefix}.input_layernorm.weight"])
        joined = torch.cat((context, y))
        q = (y @ t[f"{prefix}.self_attn.q_proj.weight"].T).unflatten(1, (NUM_HEADS, -1))
        k, v = ((joined @ t[f"{prefix}.self_attn.{n}_proj.weight"].T).unflatten(1, (NUM_KV_HEADS, -1)) for n in "kv")
        q = rope(norm(q, t[f"{prefix}.self_attn.q_norm.weight"]), places[-rows:], THETA)
        k = rope(norm(k, t[f"{prefix}.self_attn.k_norm.weight"]), places, THETA)
        hides = places > (places[-rows:, None] if causal else places[-1])
        if window is not None:
            hides = hides | (places <= places[-rows:, None] - window)
        out = torch.empty_like(q)
        for head in range(NUM_HEADS):
            scores = q[:, head] @ k[:, head * NUM_KV_HEADS // NUM_HEADS].T * self.head_dim**-0.5
            weights = scores.masked_fill(hides, -torch.inf).softmax(dim=-1)
            out[:, head] = weights @ v[:, head * NUM_KV_HEADS // NUM_HEADS]
        x = x + out.flatten(1) @ t[f"{prefix}.self_attn.o_proj.weight"].T
        y = norm(x, t[f"{prefix}.post_attention_layernorm.weight"])
        gate, up = (y @ t[f"{prefix}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return x + (F.silu(gate) * up) @ t[f"{prefix}.mlp.down_proj.weight"].T

    def biased(self, logits: torch.Tensor, before: int, hidden: torch.Tensor,
               state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.has_markov:
            return logits, state
        t = {name.removeprefix("markov_head."): tensor for name, tensor in self.tensors.items()}
        x = t["markov_w1.weight"][before]
        if "gate_proj.weight" in t:
            x = x * torch.sigmoid(F.linear(torch.cat((hidden, x)), t["gate_proj.weight"], t["gate_proj.bias"]))
        if "joint_proj.weight" in t:
            joint = F.linear(torch.cat((state, x, hidden)), t["joint_proj.weight"], t["joint_proj.bias"])
            gate, candidate, out = joint.chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            x = torch.tanh(out)
        return logits + x @ t["markov_w2.weight"].T, state

    def confidence(self, hidden: torch.Tensor, before: int) -> float:
        weight = self.tensors.get("confidence_head.proj.weight")
        if weight is None:
            return 1.0
        x = hidden
        if weight.shape[1] > len(hidden):
            x = torch.cat((x, self.tensors["markov_head.markov_w1.weight"][before]))
        return float(torch.sigmoid(F.linear(x, weight, self.tensors["confidence_head.proj.bias"])))
