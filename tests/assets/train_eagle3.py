"""Trains the small target and the EAGLE-3 head that lie beside this file: `python -m tests.assets.train_eagle3`.

Plain torch on one CPU thread, two to three minutes, the same files on every run of one machine. It shares no code
with outrider: tensors have their Hugging Face names from the start and are saved as they are.

In the language of `training.py` the next token depends on the mode, which the head can only learn from hidden states
(its slot 0 does not exist), and on the token three places back, which it must find by position in its own cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.assets.training import HERE, Language, Params, Shapes, fit, fresh, rounded, save

VOCAB, SYMBOLS, MODES, STREAMS = 128, 64, 4, 3
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 96, 256, 4, 4, 2
HEAD_DIM, THETA, EPS = HIDDEN // HEADS, 10000.0, 1e-5
TAPS = (1, 2, 4)
LENGTH, BATCH, UNROLL = 72, 40, 4
TARGET_STEPS, HEAD_STEPS = 180, 320


def language() -> Language:
    return Language(VOCAB, SYMBOLS, MODES, STREAMS)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [.., tokens, heads, dim]"""
    angles = positions[:, None, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def qkv(p: Params, prefix: str, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q = F.linear(x, p[f"{prefix}.self_attn.q_proj.weight"]).unflatten(-1, (HEADS, HEAD_DIM))
    k, v = (F.linear(x, p[f"{prefix}.self_attn.{n}_proj.weight"]).unflatten(-1, (KV_HEADS, HEAD_DIM)) for n in "kv")
    return rotated(q, positions), rotated(k, positions), v


def attended(p: Params, prefix: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             seen: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen)
    return F.linear(out.transpose(1, 2).flatten(2), p[f"{prefix}.self_attn.o_proj.weight"])


def mlp(p: Params, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (F.linear(x, p[f"{prefix}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
    return F.linear(F.silu(gate) * up, p[f"{prefix}.mlp.down_proj.weight"])


def target_forward(p: Params, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and the residual stream after 0, 1, ... layers."""
    positions = torch.arange(tokens.shape[1])
    seen = positions[:, None] >= positions
    x = F.embedding(tokens, p["model.embed_tokens.weight"])
    streams = [x]
    for index in range(LAYERS):
        name = f"model.layers.{index}"
        q, k, v = qkv(p, name, norm(x, p[f"{name}.input_layernorm.weight"]), positions)
        x = x + attended(p, name, q, k, v, seen)
        x = x + mlp(p, name, norm(x, p[f"{name}.post_attention_layernorm.weight"]))
        streams.append(x)
    return F.linear(norm(x, p["model.norm.weight"]), p["lm_head.weight"]), streams


def head_unrolled(p: Params, embedding: torch.Tensor, tokens: torch.Tensor, taps: torch.Tensor) -> list[torch.Tensor]:
    """Logits of drafts 0 .. UNROLL-1 at every slot from 1 on, each with the hidden states it would have when drafting.

    Draft s at slot p sees the filled slots up to p - s and the drafts on the way from there to p."""
    name, count = "midlayer", tokens.shape[1] - 1
    slots = torch.arange(count)  # slot p is index p - 1, which is its rope position too
    embeds = norm(F.embedding(tokens[:, 1:], embedding), p[f"{name}.input_layernorm.weight"])
    hidden = F.linear(taps[:, :-1], p["fc.weight"])
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for step in range(UNROLL):
        q, k, v = qkv(p, name, torch.cat((embeds, norm(hidden, p[f"{name}.hidden_norm.weight"])), dim=-1), slots)
        keys.append(k)
        values.append(v)
        # The diagonal of step j moves one slot back for every step after it.
        seen = [slots <= slots[:, None] - step] + [slots == slots[:, None] - step + j for j in range(1, step + 1)]
        x = hidden + attended(p, name, q, torch.cat(keys, dim=1), torch.cat(values, dim=1), torch.cat(seen, dim=1))
        x = x + mlp(p, name, norm(x, p[f"{name}.post_attention_layernorm.weight"]))
        logits.append(F.linear(norm(x, p["norm.weight"]), p["lm_head.weight"]))
        hidden = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)  # fed back to the next slot
    return logits


def layer_shapes(prefix: str, attention_in: int) -> Shapes:
    return {
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, attention_in),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, attention_in),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, attention_in),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }


def train_target(said: Language) -> Params:
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,),
    }
    for index in range(LAYERS):
        shapes |= layer_shapes(f"model.layers.{index}", HIDDEN)
    params = fresh(shapes, seed=2)
    generator = torch.Generator().manual_seed(3)

    def loss() -> torch.Tensor:
        tokens = said.texts(BATCH, LENGTH, generator)
        logits, _ = target_forward(params, tokens)
        return F.cross_entropy(logits[:, STREAMS:-1].flatten(0, 1), tokens[:, STREAMS + 1 :].flatten())

    fit(params.values(), TARGET_STEPS, 4e-3, loss, "target")
    return rounded(params)


def train_head(said: Language, target: Params) -> Params:
    shapes = layer_shapes("midlayer", 2 * HIDDEN) | {
        "midlayer.hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,), "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "lm_head.weight": (SYMBOLS, HIDDEN),
    }
    params = fresh(shapes, seed=4)
    generator = torch.Generator().manual_seed(5)

    def loss() -> torch.Tensor:
        tokens = said.texts(BATCH, LENGTH, generator)
        with torch.no_grad():
            logits, streams = target_forward(target, tokens)
            wanted = logits[:, 1:, said.symbols].softmax(dim=-1)  # slot p guesses what the target does at p
        taps = torch.cat([streams[tap] for tap in TAPS], dim=-1)
        drafts = head_unrolled(params, target["model.embed_tokens.weight"], tokens, taps)
        total = torch.zeros(())
        for step, guess in enumerate(drafts):
            rows = slice(STREAMS + step, None)
            total = total + F.cross_entropy(guess[:, rows].flatten(0, 1), wanted[:, rows].flatten(0, 1))
        return total / len(drafts)

    fit(params.values(), HEAD_STEPS, 4e-3, loss, "head")
    return rounded(params)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    said = language()
    sizes: dict[str, object] = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": EPS,
        "rope_theta": THETA, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float16",
    }
    target = train_target(said)
    save(HERE / "target", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS} | sizes, target)
    head = train_head(said, target)
    offsets = said.symbols - torch.arange(SYMBOLS)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": SYMBOLS,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
    }
    save(HERE / "eagle3", config | sizes, head | {"d2t": offsets})


if __name__ == "__main__":
    main()
