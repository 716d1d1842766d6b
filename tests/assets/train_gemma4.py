"""Trains the small Gemma 4 and its assistant that lie beside this file: `python -m tests.assets.train_gemma4`.

transformers' own models on one CPU thread, some minutes, the same files on every run of one machine. It shares no code
with outrider.

The language is that of `training.py` with more streams than drafts. So every draft depends on a token some places
back, which the assistant can only find by position in the target's cache, and on the mode, which it must take from the
target's hidden state, since in training the cache mostly tells of another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tests.assets.training import HERE, Language, fit

if TYPE_CHECKING:  # tests take the language from here and need no transformers for it
    from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

VOCAB, SYMBOLS, MODES, STREAMS = 80, 64, 3, 5
WINDOW, LENGTH, BATCH, DRAFTS = 8, 64, 24, 3
TARGET_STEPS, ASSISTANT_STEPS = 450, 450
SLIDING, FULL = "sliding_attention", "full_attention"
SHAPE = {
    "vocab_size": VOCAB, "head_dim": 32, "global_head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": WINDOW, "max_position_embeddings": 512,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}


def language() -> Language:
    return Language(VOCAB, SYMBOLS, MODES, STREAMS)


def spread(model: torch.nn.Module, seed: int) -> None:
    """Wide enough to learn from in a few hundred steps."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)


def rounded(model: torch.nn.Module) -> None:
    """As it will be saved, so that the assistant is trained for the target that is."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())


def train_target(said: Language) -> Gemma4ForCausalLM:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(hidden_size=96, intermediate_size=192, num_hidden_layers=4,
                              layer_types=[SLIDING, SLIDING, SLIDING, FULL], **SHAPE)
    model = Gemma4ForCausalLM(config)
    spread(model, seed=2)
    generator = torch.Generator().manual_seed(3)

    def loss() -> torch.Tensor:
        tokens = said.texts(BATCH, LENGTH, generator)
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, STREAMS:-1].flatten(0, 1), tokens[:, STREAMS + 1 :].flatten())

    fit(model.parameters(), TARGET_STEPS, 3e-3, loss, "target")
    rounded(model)
    return model.eval()


def drafts_everywhere(model: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, tokens: torch.Tensor,
                      hidden: torch.Tensor, caches: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Logits of draft 0, 1, ... at every place p whose token is the last known one: each sees keys up to p - 1, stands
    at position p and is given the right draft before it."""
    count = tokens.shape[1] - DRAFTS
    places = torch.arange(1, count)
    behind = places[:, None] - torch.arange(tokens.shape[1])  # how far a key lies behind a query
    masks = {FULL: behind >= 1, SLIDING: (behind >= 1) & (behind <= WINDOW)}
    masks = {kind: mask.expand(tokens.shape[0], 1, -1, -1) for kind, mask in masks.items()}
    state = hidden[:, : count - 1]
    logits: list[torch.Tensor] = []
    for draft in range(DRAFTS):
        embedded = target.get_input_embeddings()(tokens[:, 1 + draft : count + draft])
        out = model.model(
            inputs_embeds=model.pre_projection(torch.cat((embedded, state), dim=-1)), attention_mask=masks,
            position_ids=places[None], shared_kv_states=caches, use_cache=False,
        ).last_hidden_state
        logits.append(model.lm_head(out))
        state = model.post_projection(out)
    return logits


def train_assistant(said: Language, target: Gemma4ForCausalLM) -> Gemma4AssistantForCausalLM:
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    text = Gemma4TextConfig(hidden_size=64, intermediate_size=192, num_hidden_layers=2, layer_types=[SLIDING, FULL],
                            num_kv_shared_layers=2, **SHAPE)
    model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=96))
    spread(model, seed=4)
    generator = torch.Generator().manual_seed(5)

    def loss() -> torch.Tensor:
        tokens = said.texts(BATCH, LENGTH, generator)
        # Mostly the cache is that of the same text with any mode before it, and in full layers often that of another
        # text: else cache and hidden state both tell the mode, and neither would be missed.
        other = tokens.clone()
        other[:, 0] = torch.randint(MODES, (BATCH,), generator=generator)
        other[: BATCH // 6, 0] = tokens[: BATCH // 6, 0]
        with torch.no_grad():
            out = target(tokens, use_cache=False, output_hidden_states=True)
            caches = target(other, use_cache=False, return_shared_kv_states=True).shared_kv_states
            wanted = out.logits.softmax(dim=-1)
        for part in caches[FULL]:
            part[BATCH // 2 :] = part[BATCH // 2 :].roll(1, 0)
        drafts = drafts_everywhere(model, target, tokens, out.hidden_states[-1], caches)
        total = torch.zeros(())
        for draft, guess in enumerate(drafts):
            # The draft after place p + draft is what the target says there.
            right = wanted[:, 1 + draft : 1 + draft + guess.shape[1]]
            total = total + F.cross_entropy(guess[:, STREAMS:].flatten(0, 1), right[:, STREAMS:].flatten(0, 1))
        return total / DRAFTS

    fit(model.parameters(), ASSISTANT_STEPS, 3e-3, loss, "assistant")
    rounded(model)
    return model.eval()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    said = language()
    target = train_target(said)
    target.half().save_pretrained(HERE / "gemma4")
    assistant = train_assistant(said, target.float())
    assistant.half().save_pretrained(HERE / "gemma4_assistant")


if __name__ == "__main__":
    main()
