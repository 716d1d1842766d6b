"""Trains the small DeepSeek-V3.2 with its MTP module: `python -m tests.assets.train_deepseek_v32`.

Plain torch on one CPU thread, some minutes, the same files on every run of one machine. It shares no code with
outrider: tensors have their Hugging Face names from the start and are saved as they are.

In the language of `training.py` the next token depends on the mode, which is the first token, and on the token three
places back. Texts are longer than the indexers' top-k, so an indexer that does not choose these positions shows.
Indexers learn from the attention's own shares, while it still attends to everything; then layers attend to what they
choose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.assets.training import HERE, Language, Params, Shapes, fit, fresh, rounded, save

SYMBOLS, MODES, STREAMS = 24, 2, 3
VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS = 28, 48, 96, 2, 4
Q_RANK, KV_RANK, ROPE, NOPE, VALUE = 24, 24, 8, 8, 12
INDEX_HEADS, INDEX_DIM, TOP_K = 16, 12, 12
EXPERTS, TAKEN, GROUPS, TOP_GROUPS, EXPERT_WIDTH = 4, 2, 2, 1, 32
ROUTED_SCALE, THETA, EPS, INNER_EPS = 1.5, 10000.0, 1e-5, 1e-6
LENGTH, BATCH, UNROLL = 40, 12, 3
TARGET_STEPS, HEAD_STEPS = 150, 220
MODULE = f"model.layers.{LAYERS}"


def language() -> Language:
    return Language(VOCAB, SYMBOLS, MODES, STREAMS)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotated(x: torch.Tensor, positions: torch.Tensor, *, in_pairs: bool) -> torch.Tensor:
    """x [.., tokens, heads, rotating | rest]. Pairs end up in halves, which changes no product."""
    turning, rest = x[..., :ROPE], x[..., ROPE:]
    angles = positions[:, None, None] * THETA ** (-torch.arange(0, ROPE, 2) / ROPE)
    a, b = (turning[..., ::2], turning[..., 1::2]) if in_pairs else turning.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest), dim=-1)


class Attention:
    """One layer over texts whose keys may come from several passes. Sums up how far its indexer is from the shares of
    the attention."""

    def __init__(self, p: Params, name: str, *, is_sparse: bool) -> None:
        self.p, self.name, self.is_sparse = p, f"{name}.self_attn", is_sparse
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.index_keys: list[torch.Tensor] = []
        self.distance = torch.zeros(())

    def _linear(self, part: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.p[f"{self.name}.{part}.weight"])

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """x [texts, tokens, hidden]; seen [tokens, keys of all passes, this one's last]."""
        compressed_q = norm(self._linear("q_a_proj", x), self.p[f"{self.name}.q_a_layernorm.weight"], INNER_EPS)
        q = self._linear("q_b_proj", compressed_q).unflatten(-1, (HEADS, NOPE + ROPE))
        q = torch.cat((q[..., :NOPE], rotated(q[..., NOPE:], positions, in_pairs=True)), dim=-1)
        latent, key = self._linear("kv_a_proj_with_mqa", x).split((KV_RANK, ROPE), dim=-1)
        latent = norm(latent, self.p[f"{self.name}.kv_a_layernorm.weight"], INNER_EPS)
        k, v = self._linear("kv_b_proj", latent).unflatten(-1, (HEADS, NOPE + VALUE)).split((NOPE, VALUE), dim=-1)
        turned = rotated(key[:, :, None], positions, in_pairs=True).expand(-1, -1, HEADS, -1)
        self.keys.append(torch.cat((k, turned), dim=-1))
        self.values.append(v)
        logits = torch.einsum("bthd,bshd->bhts", q, torch.cat(self.keys, dim=1)) * (NOPE + ROPE) ** -0.5
        chosen = self._choose(x.detach(), compressed_q.detach(), positions, logits, seen)
        shares = logits.masked_fill(~chosen, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("bhts,bshd->bthd", shares, torch.cat(self.values, dim=1))
        return self._linear("o_proj", mixed.flatten(2))

    def _choose(self, x: torch.Tensor, compressed_q: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor,
                seen: torch.Tensor) -> torch.Tensor:
        """[texts, 1, tokens, keys] what is attended to."""
        q = self._linear("indexer.wq_b", compressed_q).unflatten(-1, (INDEX_HEADS, INDEX_DIM))
        affine = (self.p[f"{self.name}.indexer.k_norm.{part}"] for part in ("weight", "bias"))
        key = F.layer_norm(self._linear("indexer.wk", x), (INDEX_DIM,), *affine, INNER_EPS)
        self.index_keys.append(rotated(key[:, :, None], positions, in_pairs=False)[:, :, 0])
        dots = torch.einsum("bthd,bsd->bhts", rotated(q, positions, in_pairs=False), torch.cat(self.index_keys, dim=1))
        weights = self._linear("indexer.weights_proj", x) * (INDEX_HEADS * INDEX_DIM) ** -0.5
        scores = torch.einsum("bth,bhts->bts", weights, dots.relu()).masked_fill(~seen, -torch.inf)
        shares = logits.detach().masked_fill(~seen, -torch.inf).softmax(dim=-1).mean(dim=1)
        self.distance = self.distance - (shares * scores.log_softmax(dim=-1).masked_fill(~seen, 0.0)).sum(-1).mean()
        if not self.is_sparse or scores.shape[-1] <= TOP_K:
            return seen.expand_as(scores)[:, None]
        least = scores.topk(TOP_K, dim=-1).values[..., -1:]
        return (seen & (scores >= least))[:, None]


def gated(p: Params, name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (F.linear(x, p[f"{name}.{n}_proj.weight"]) for n in ("gate", "up"))
    return F.linear(F.silu(gate) * up, p[f"{name}.down_proj.weight"])


def experts(p: Params, name: str, x: torch.Tensor) -> torch.Tensor:
    """Every expert computes every token; those that were not taken count for nothing."""
    scores = F.linear(x, p[f"{name}.gate.weight"]).sigmoid()
    biased = (scores + p[f"{name}.gate.e_score_correction_bias"]).detach().unflatten(-1, (GROUPS, -1))
    groups = biased.topk(2, dim=-1).values.sum(-1).topk(TOP_GROUPS, dim=-1).indices
    allowed = F.one_hot(groups, GROUPS).sum(-2)[..., None].bool()
    taken = biased.masked_fill(~allowed, -torch.inf).flatten(-2).topk(TAKEN, dim=-1).indices
    weights = scores * F.one_hot(taken, EXPERTS).sum(-2)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * ROUTED_SCALE
    made = torch.stack([gated(p, f"{name}.experts.{i}", x) for i in range(EXPERTS)], dim=-1)
    return (made * weights[..., None, :]).sum(-1) + gated(p, f"{name}.shared_experts", x)


def layer(p: Params, name: str, attention: Attention, x: torch.Tensor, positions: torch.Tensor,
          seen: torch.Tensor) -> torch.Tensor:
    x = x + attention(norm(x, p[f"{name}.input_layernorm.weight"]), positions, seen)
    y = norm(x, p[f"{name}.post_attention_layernorm.weight"])
    return x + (gated if name == "model.layers.0" else experts)(p, f"{name}.mlp", y)


def target_forward(p: Params, tokens: torch.Tensor, *,
                   is_sparse: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, the hidden states after the last norm, and how far the indexers are from the attention."""
    positions = torch.arange(tokens.shape[1])
    seen = positions[:, None] >= positions
    x, distance = F.embedding(tokens, p["model.embed_tokens.weight"]), torch.zeros(())
    for name in (f"model.layers.{i}" for i in range(LAYERS)):
        attention = Attention(p, name, is_sparse=is_sparse)
        x = layer(p, name, attention, x, positions, seen)
        distance = distance + attention.distance
    hidden = norm(x, p["model.norm.weight"])
    return F.linear(hidden, p["lm_head.weight"]), hidden, distance


def head_unrolled(p: Params, target: Params, tokens: torch.Tensor, hidden: torch.Tensor, *,
                  is_sparse: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits of drafts 0 .. UNROLL-1 at every slot from 1 on, each with the hidden states it would have when drafting,
    and how far the indexer is from the attention.

    Draft s at slot p sees the filled slots up to p - s and the drafts on the way from there to p."""
    slots = torch.arange(tokens.shape[1] - 1)  # slot p is index p - 1, which is its rope position too
    embeds = F.embedding(tokens[:, 1:], target["model.embed_tokens.weight"]) * (slots > 0)[:, None]
    embeds = norm(embeds, p[f"{MODULE}.enorm.weight"])
    attention, state = Attention(p, MODULE, is_sparse=is_sparse), hidden[:, :-1]
    logits: list[torch.Tensor] = []
    for step in range(UNROLL):
        both = torch.cat((embeds, norm(state, p[f"{MODULE}.hnorm.weight"])), dim=-1)
        # The diagonal of step j moves one slot back for every step after it.
        seen = [slots <= slots[:, None] - step] + [slots == slots[:, None] - step + j for j in range(1, step + 1)]
        seen[-1] = seen[-1] | (slots[:, None] < step) & (slots == slots[:, None])  # rows that nobody asks for
        x = layer(p, MODULE, attention, F.linear(both, p[f"{MODULE}.eh_proj.weight"]), slots, torch.cat(seen, dim=1))
        x = norm(x, p[f"{MODULE}.shared_head.norm.weight"])
        logits.append(F.linear(x, target["lm_head.weight"]))
        state = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)  # fed back to the next slot
    return logits, attention.distance


def mlp_shapes(name: str, width: int) -> Shapes:
    return {f"{name}.gate_proj.weight": (width, HIDDEN), f"{name}.up_proj.weight": (width, HIDDEN),
            f"{name}.down_proj.weight": (HIDDEN, width)}


def layer_shapes(name: str) -> Shapes:
    at = f"{name}.self_attn"
    shapes: Shapes = {
        f"{name}.input_layernorm.weight": (HIDDEN,), f"{name}.post_attention_layernorm.weight": (HIDDEN,),
        f"{at}.q_a_proj.weight": (Q_RANK, HIDDEN), f"{at}.q_a_layernorm.weight": (Q_RANK,),
        f"{at}.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        f"{at}.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, HIDDEN), f"{at}.kv_a_layernorm.weight": (KV_RANK,),
        f"{at}.kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK), f"{at}.o_proj.weight": (HIDDEN, HEADS * VALUE),
        f"{at}.indexer.wq_b.weight": (INDEX_HEADS * INDEX_DIM, Q_RANK), f"{at}.indexer.wk.weight": (INDEX_DIM, HIDDEN),
        f"{at}.indexer.k_norm.weight": (INDEX_DIM,), f"{at}.indexer.k_norm.bias": (INDEX_DIM,),
        f"{at}.indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
    }
    if name == "model.layers.0":
        return shapes | mlp_shapes(f"{name}.mlp", INTERMEDIATE)
    shapes |= {f"{name}.mlp.gate.weight": (EXPERTS, HIDDEN), f"{name}.mlp.gate.e_score_correction_bias": (EXPERTS,)}
    for part in [f"experts.{i}" for i in range(EXPERTS)] + ["shared_experts"]:
        shapes |= mlp_shapes(f"{name}.mlp.{part}", EXPERT_WIDTH)
    return shapes


def begin(shapes: Shapes, seed: int) -> Params:
    params = fresh(shapes, seed)
    with torch.no_grad():
        for name, value in params.items():
            if name.endswith("k_norm.bias"):
                value.zero_()
            elif name.endswith("e_score_correction_bias"):
                value.copy_(torch.linspace(-0.02, 0.02, EXPERTS))
    return params


def train_target(said: Language) -> Params:
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,),
    }
    for index in range(LAYERS):
        shapes |= layer_shapes(f"model.layers.{index}")
    params = begin(shapes, seed=2)
    generator, num_done = torch.Generator().manual_seed(3), 0

    def loss() -> torch.Tensor:
        nonlocal num_done
        num_done += 1
        tokens = said.texts(BATCH, LENGTH, generator)
        logits, _, distance = target_forward(params, tokens, is_sparse=num_done > TARGET_STEPS * 2 // 3)
        return F.cross_entropy(logits[:, STREAMS:-1].flatten(0, 1), tokens[:, STREAMS + 1 :].flatten()) + 0.1 * distance

    fit(params.values(), TARGET_STEPS, 5e-3, loss, "target")
    return rounded(params)


def train_head(said: Language, target: Params) -> Params:
    shapes = layer_shapes(MODULE) | {
        f"{MODULE}.enorm.weight": (HIDDEN,), f"{MODULE}.hnorm.weight": (HIDDEN,),
        f"{MODULE}.eh_proj.weight": (HIDDEN, 2 * HIDDEN), f"{MODULE}.shared_head.norm.weight": (HIDDEN,),
    }
    params = begin(shapes, seed=4)
    generator, num_done = torch.Generator().manual_seed(5), 0

    def loss() -> torch.Tensor:
        nonlocal num_done
        num_done += 1
        tokens = said.texts(BATCH, LENGTH, generator)
        with torch.no_grad():
            logits, hidden, _ = target_forward(target, tokens)
            wanted = logits[:, 1:].softmax(dim=-1)  # slot p guesses what the target does at p
        drafts, distance = head_unrolled(params, target, tokens, hidden, is_sparse=num_done > HEAD_STEPS * 2 // 3)
        total = 0.1 * distance
        for step, guess in enumerate(drafts):
            rows = slice(STREAMS + step, None)
            total = total + F.cross_entropy(guess[:, rows].flatten(0, 1), wanted[:, rows].flatten(0, 1))
        return total / len(drafts)

    fit(params.values(), HEAD_STEPS, 5e-3, loss, "head")
    return rounded(params)


def config() -> dict[str, object]:
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "index_topk": TOP_K,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": TAKEN, "n_group": GROUPS, "topk_group": TOP_GROUPS,
        "n_shared_experts": 1, "moe_intermediate_size": EXPERT_WIDTH, "routed_scaling_factor": ROUTED_SCALE,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1,
        "rope_theta": THETA, "max_position_embeddings": 512, "rms_norm_eps": EPS, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "float16",
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    said = language()
    target = train_target(said)
    save(HERE / "deepseek_v32", config(), target | train_head(said, target))


if __name__ == "__main__":
    main()
