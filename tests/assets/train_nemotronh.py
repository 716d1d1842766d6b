"""Trains the small NemotronH with its MTP module that lies beside this file: `python -m tests.assets.train_nemotronh`.

Plain torch on one CPU thread, some minutes, the same files on every run of one machine. It shares no code with
outrider: tensors have their Hugging Face names from the start and are saved as they are.

The language of `training.py` behind a token that begins every text, so that the mode's token has a slot in the module's
cache. The module knows no positions. What came a token ago it can only take from the hidden state; the mode it must
find in its cache, since in training the hidden states mostly tell of another one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.assets.training import HERE, Language, Params, Shapes, fit, fresh, rounded, save

SYMBOLS, MODES, STREAMS = 64, 4, 2
BEGIN = 80  # after the language's own ids
VOCAB, HIDDEN, INTERMEDIATE, EPS = 88, 96, 224, 1e-5
PATTERN, MTP_PATTERN = "M*M-", "*-"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 24
MAMBA_HEADS, MAMBA_DIM, GROUPS, STATE, CONV = 8, 16, 2, 16, 4
INNER = MAMBA_HEADS * MAMBA_DIM
CONV_DIM = INNER + 2 * GROUPS * STATE
LENGTH, BATCH, UNROLL = 56, 40, 4
TARGET_STEPS, HEAD_STEPS = 300, 500
FIRST = 2  # the first symbol's place


def language() -> Language:
    return Language(BEGIN, SYMBOLS, MODES, STREAMS)


def texts(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[count, length] token ids: the beginning, a mode, symbols."""
    said = language().texts(count, length - 1, generator)
    return torch.cat((torch.full((count, 1), BEGIN), said), dim=1)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def qkv(p: Params, name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = (F.linear(x, p[f"{name}.{part}_proj.weight"]).unflatten(-1, (-1, HEAD_DIM)) for part in "qkv")
    return q, k, v


def attended(p: Params, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             seen: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen)
    return F.linear(out.transpose(1, 2).flatten(2), p[f"{name}.o_proj.weight"])


def mlp(p: Params, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, p[f"{name}.up_proj.weight"]).relu().square(), p[f"{name}.down_proj.weight"])


def mamba(p: Params, name: str, x: torch.Tensor) -> torch.Tensor:
    """Mamba-2 over whole texts: what token j added, as it has decayed at token i."""
    z, conv_in, dt = F.linear(x, p[f"{name}.in_proj.weight"]).split((INNER, CONV_DIM, MAMBA_HEADS), dim=-1)
    convolved = F.conv1d(F.pad(conv_in.transpose(1, 2), (CONV - 1, 0)), p[f"{name}.conv1d.weight"],
                         p[f"{name}.conv1d.bias"], groups=CONV_DIM)
    values, b, c = F.silu(convolved).transpose(1, 2).split((INNER, GROUPS * STATE, GROUPS * STATE), dim=-1)
    values = values.unflatten(-1, (MAMBA_HEADS, MAMBA_DIM)).transpose(1, 2)  # [texts, heads, tokens, dim]
    b, c = (part.unflatten(-1, (GROUPS, STATE)).repeat_interleave(MAMBA_HEADS // GROUPS, dim=2).transpose(1, 2)
            for part in (b, c))
    dt = F.softplus(dt + p[f"{name}.dt_bias"]).transpose(1, 2)  # [texts, heads, tokens]
    log_decay = (-dt * p[f"{name}.A_log"].exp()[:, None]).cumsum(dim=-1)
    left = (log_decay[..., :, None] - log_decay[..., None, :]).clamp_max(0).exp().tril()
    y = (c @ b.transpose(-1, -2) * left) @ (values * dt[..., None]) + values * p[f"{name}.D"][:, None, None]
    gated = (y.transpose(1, 2).flatten(2) * F.silu(z)).unflatten(-1, (GROUPS, -1))
    normed = F.rms_norm(gated, (INNER // GROUPS,), None, EPS).flatten(2) * p[f"{name}.norm.weight"]
    return F.linear(normed, p[f"{name}.out_proj.weight"])


def target_forward(p: Params, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the hidden states after the last norm."""
    places = torch.arange(tokens.shape[1])
    seen = places[:, None] >= places
    x = F.embedding(tokens, p["backbone.embeddings.weight"])
    for index, kind in enumerate(PATTERN):
        name = f"backbone.layers.{index}"
        y = norm(x, p[f"{name}.norm.weight"])
        match kind:
            case "M":
                x = x + mamba(p, f"{name}.mixer", y)
            case "*":
                x = x + attended(p, f"{name}.mixer", *qkv(p, f"{name}.mixer", y), seen)
            case _:
                x = x + mlp(p, f"{name}.mixer", y)
    hidden = norm(x, p["backbone.norm_f.weight"])
    return F.linear(hidden, p["lm_head.weight"]), hidden


def head_unrolled(p: Params, target: Params, tokens: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Logits of drafts 0 .. UNROLL-1 at every slot from 1 on, each with the hidden states it would have when drafting.

    Draft s at slot p sees the filled slots up to p - s and the drafts on the way from there to p."""
    slots = torch.arange(tokens.shape[1] - 1)  # slot p is index p - 1
    embeds = norm(F.embedding(tokens[:, 1:], target["backbone.embeddings.weight"]), p["mtp.layers.0.enorm.weight"])
    state = hidden[:, :-1]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for step in range(UNROLL):
        both = torch.cat((embeds, norm(state, p["mtp.layers.0.hnorm.weight"])), dim=-1)
        x = F.linear(both, p["mtp.layers.0.eh_proj.weight"])
        q, k, v = qkv(p, "mtp.layers.0.mixer", norm(x, p["mtp.layers.0.norm.weight"]))
        keys.append(k)
        values.append(v)
        # The diagonal of step j moves one slot back for every step after it.
        seen = [slots <= slots[:, None] - step] + [slots == slots[:, None] - step + j for j in range(1, step + 1)]
        x = x + attended(p, "mtp.layers.0.mixer", q, torch.cat(keys, dim=1), torch.cat(values, dim=1),
                         torch.cat(seen, dim=1))
        x = x + mlp(p, "mtp.layers.1.mixer", norm(x, p["mtp.layers.1.norm.weight"]))
        x = norm(x, p["mtp.layers.1.final_layernorm.weight"])
        logits.append(F.linear(x, target["lm_head.weight"]))
        state = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)  # fed back to the next slot
    return logits


def attention_shapes(name: str) -> Shapes:
    return {f"{name}.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN), f"{name}.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN), f"{name}.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM)}


def mlp_shapes(name: str) -> Shapes:
    return {f"{name}.up_proj.weight": (INTERMEDIATE, HIDDEN), f"{name}.down_proj.weight": (HIDDEN, INTERMEDIATE)}


def mamba_shapes(name: str) -> Shapes:
    return {
        f"{name}.in_proj.weight": (INNER + CONV_DIM + MAMBA_HEADS, HIDDEN), f"{name}.out_proj.weight": (HIDDEN, INNER),
        f"{name}.conv1d.weight": (CONV_DIM, 1, CONV), f"{name}.conv1d.bias": (CONV_DIM,),
        f"{name}.norm.weight": (INNER,), f"{name}.A_log": (MAMBA_HEADS,), f"{name}.D": (MAMBA_HEADS,),
        f"{name}.dt_bias": (MAMBA_HEADS,),
    }


def layer_shapes(prefix: str, pattern: str) -> Shapes:
    shapes: Shapes = {}
    makers = {"M": mamba_shapes, "*": attention_shapes, "-": mlp_shapes}
    for index, kind in enumerate(pattern):
        shapes |= {f"{prefix}.{index}.norm.weight": (HIDDEN,)} | makers[kind](f"{prefix}.{index}.mixer")
    return shapes


def train_target() -> Params:
    shapes = layer_shapes("backbone.layers", PATTERN) | {
        "backbone.embeddings.weight": (VOCAB, HIDDEN), "backbone.norm_f.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    params = fresh(shapes, seed=2)
    with torch.no_grad():
        for name, value in params.items():
            if name.endswith("conv1d.weight"):
                value.mul_(CONV**-0.5)
            elif name.endswith("dt_bias"):
                value.copy_(torch.linspace(-4.0, 0.0, MAMBA_HEADS))
            elif name.endswith(("A_log", "conv1d.bias")):
                value.zero_()
    generator = torch.Generator().manual_seed(3)

    def loss() -> torch.Tensor:
        tokens = texts(BATCH, LENGTH, generator)
        logits, _ = target_forward(params, tokens)
        rows = slice(FIRST + STREAMS - 1, -1)
        return F.cross_entropy(logits[:, rows].flatten(0, 1), tokens[:, FIRST + STREAMS :].flatten())

    fit(params.values(), TARGET_STEPS, 4e-3, loss, "target")
    return rounded(params)


def train_head(target: Params) -> Params:
    shapes = layer_shapes("mtp.layers", MTP_PATTERN) | {
        "mtp.layers.0.enorm.weight": (HIDDEN,), "mtp.layers.0.hnorm.weight": (HIDDEN,),
        "mtp.layers.0.eh_proj.weight": (HIDDEN, 2 * HIDDEN), "mtp.layers.1.final_layernorm.weight": (HIDDEN,),
    }
    params = fresh(shapes, seed=4)
    generator = torch.Generator().manual_seed(5)

    def loss() -> torch.Tensor:
        tokens = texts(BATCH, LENGTH, generator)
        # Else the hidden states told the mode as well as the cache does, and the cache would not be missed.
        other = tokens.clone()
        other[BATCH // 6 :, 1] = torch.randint(MODES, (BATCH - BATCH // 6,), generator=generator)
        with torch.no_grad():
            logits, _ = target_forward(target, tokens)
            _, hidden = target_forward(target, other)
            wanted = logits[:, 1:].softmax(dim=-1)  # slot p guesses what the target does at p
        drafts = head_unrolled(params, target, tokens, hidden)
        total = torch.zeros(())
        for step, guess in enumerate(drafts):
            rows = slice(FIRST + STREAMS - 1 + step, None)
            total = total + F.cross_entropy(guess[:, rows].flatten(0, 1), wanted[:, rows].flatten(0, 1))
        return total / len(drafts)

    fit(params.values(), HEAD_STEPS, 4e-3, loss, "head")
    return rounded(params)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = train_target()
    head = train_head(target)
    config: dict[str, object] = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": PATTERN,
        "num_hidden_layers": len(PATTERN), "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": MTP_PATTERN,
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "mamba_num_heads": MAMBA_HEADS,
        "mamba_head_dim": MAMBA_DIM, "n_groups": GROUPS, "ssm_state_size": STATE, "conv_kernel": CONV,
        "use_conv_bias": True, "vocab_size": VOCAB, "max_position_embeddings": 512, "layer_norm_epsilon": EPS,
        "mlp_hidden_act": "relu2", "tie_word_embeddings": False, "dtype": "float16",
    }
    save(HERE / "nemotronh", config, target | head)


if __name__ == "__main__":
    main()
