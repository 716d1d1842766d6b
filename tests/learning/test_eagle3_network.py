"""Texts of a micro-batch do not see each other, nor what they are padded with."""

from __future__ import annotations

from functools import partial

import torch

from outrider.trainable.eagle3_network import Eagle3Network, HeadForm, TextSlots
from outrider.trainable.named_layers import rotate

HIDDEN, NUM_AUX, PASSES, LENGTHS = 16, 2, 3, (9, 1, 4, 12)
FORM = HeadForm(8, 1e-5, partial(rotate, theta=100.0), norms_aux=True, feeds_back_normed=True)
SHAPES = {
    "fc": (HIDDEN, NUM_AUX * HIDDEN), "fc_norm.0": (HIDDEN,), "fc_norm.1": (HIDDEN,), "norm": (HIDDEN,),
    "midlayer.input_layernorm": (HIDDEN,), "midlayer.hidden_norm": (HIDDEN,),
    "midlayer.post_attention_layernorm": (HIDDEN,), "midlayer.self_attn.q_proj": (32, 2 * HIDDEN),
    "midlayer.self_attn.k_proj": (16, 2 * HIDDEN), "midlayer.self_attn.v_proj": (16, 2 * HIDDEN),
    "midlayer.self_attn.o_proj": (HIDDEN, 32), "midlayer.mlp.gate_proj": (20, HIDDEN),
    "midlayer.mlp.up_proj": (20, HIDDEN), "midlayer.mlp.down_proj": (HIDDEN, 20),
}


def test_texts_that_are_padded_together_give_what_they_give_alone() -> None:
    random = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape, generator=random, dtype=torch.float64)
               for name, shape in SHAPES.items()}
    network = Eagle3Network(FORM, weights)
    embeds = torch.randn(len(LENGTHS), max(LENGTHS), HIDDEN, generator=random, dtype=torch.float64)
    aux_states = torch.randn(len(LENGTHS), max(LENGTHS), NUM_AUX, HIDDEN, generator=random, dtype=torch.float64)
    slots = TextSlots.from_lengths(torch.tensor(LENGTHS), max(LENGTHS))
    together = list(network.passes(embeds, aux_states, slots, PASSES))
    for text, length in enumerate(LENGTHS):
        alone = TextSlots.from_lengths(torch.tensor([length]), length)
        passes = list(network.passes(embeds[[text], :length], aux_states[[text], :length], alone, PASSES))
        assert len(passes) == (PASSES if length > 1 else 0)
        for index, states in enumerate(passes):
            slot = torch.arange(1, max(1, length - index))  # those whose text has a token for the pass
            found = together[index][slots.rows_of(text * max(LENGTHS) + slot)]
            torch.testing.assert_close(found, states[slot - 1])
