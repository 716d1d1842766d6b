"""Every family against transformers: logits, hidden states, greedy text; and against itself in chunks and dtypes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.cache.kinds import FullSpec, SlidingSpec
from outrider.layers import StepContext
from outrider.mixers import WantedRows
from tests.models.oracle import (
    FAMILIES,
    DenseAttend,
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    hf_logits,
    hf_model,
    load,
    make_folder,
    tokens_of,
)

Folders = Callable[[str], Path]


def edit_config(folder: Path, **changes: object) -> None:
    """Change config.json; None removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    assert_logits_equal(folder_of(family), count=80)  # five windows of 16; beyond 64 positions ropes are scaled


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_equals_whole(folder_of: Folders, family: str) -> None:
    assert_chunked_equals_whole(folder_of(family), 60, (1, 15, 1, 2, 30), 1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers(folder_of: Folders, family: str) -> None:
    assert_greedy_text_equals(folder_of(family))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_taps_are_the_residual_stream(folder_of: Folders, family: str) -> None:
    tokens = tokens_of(seed=4, count=40)
    with torch.no_grad():
        states = hf_model(folder_of(family)).model(tokens[None], output_hidden_states=True).hidden_states
    model = load(folder_of(family))
    hidden = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(40)), aux_layers=(0, 1, 3, 4))
    for state, layer in zip(hidden.aux_states[:3], (0, 1, 3), strict=True):
        torch.testing.assert_close(state, states[layer][0], atol=1e-4, rtol=1e-4)
    assert torch.equal(hidden.aux_states[3], hidden.before_norm)
    torch.testing.assert_close(hidden.final, states[4][0], atol=1e-4, rtol=1e-4)  # their last one is after the norm
    torch.testing.assert_close(model.norm(hidden.before_norm), hidden.final)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_some_token_rows_of_the_last_layer_are_those_of_all(folder_of: Folders, family: str) -> None:
    model, tokens, rows = load(folder_of(family)), tokens_of(seed=5, count=30), torch.tensor([29, 3, 3, 11])
    whole = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(30)), aux_layers=(2,))
    hidden = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(30)), aux_layers=(2,),
                           rows=WantedRows(rows))
    torch.testing.assert_close(hidden.final_of(rows), whole.final_of(rows))
    torch.testing.assert_close(hidden.last_final(rows[1:], torch.tensor([1, 2, 9])), whole.final[rows[1:]])
    torch.testing.assert_close(hidden.before_norm, whole.before_norm[rows])
    assert torch.equal(hidden.aux_states[0], whole.aux_states[0]), "they have all token rows"
    with pytest.raises(AssertionError, match="other token rows"):
        hidden.final_of(rows.clone())


def test_taps_come_in_the_order_asked(folder_of: Folders) -> None:
    model = load(folder_of("llama"))
    tokens = tokens_of(seed=4, count=5)
    up = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(5)), aux_layers=(1, 3)).aux_states
    down = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(5)), aux_layers=(3, 1)).aux_states
    assert torch.equal(up[0], down[1]) and torch.equal(up[1], down[0]) and not torch.equal(up[0], up[1])


@pytest.mark.parametrize("family", ["llama_bias", "qwen3", "gemma3"])
def test_bfloat16_is_near_float64(folder_of: Folders, family: str) -> None:
    """The tiny models amplify rounding, so transformers' own error is the yardstick."""
    tokens = tokens_of(seed=5, count=40)
    exact = all_logits(load(folder_of(family), torch.float64), tokens)
    model = load(folder_of(family), torch.bfloat16)
    logits = all_logits(model, tokens)
    assert logits.dtype == torch.float32
    assert logits.to(torch.bfloat16).float().ne(logits).any(), "logits must not be rounded to 16 bits"
    theirs = hf_logits(folder_of(family), tokens, dtype=torch.bfloat16)
    assert (logits - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def test_gemma3_caps_attention_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads attn_logit_softcapping for Gemma 3 and drops it on the way; its attention function has it."""
    from transformers.models.gemma3 import modeling_gemma3

    folder = make_folder("gemma3", tmp_path, attn_logit_softcapping=2.0)
    tokens = tokens_of(seed=6, count=40)
    logits = all_logits(load(folder), tokens)
    assert (logits - hf_logits(folder, tokens)).abs().max() > 1e-2
    capped = functools.partial(modeling_gemma3.eager_attention_forward, softcap=2.0)
    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    assert (logits - hf_logits(folder, tokens, attn_implementation="eager")).abs().max() < 1e-4


def test_cache_layers_say_what_each_layer_keeps(folder_of: Folders) -> None:
    full, sliding = FullSpec(2, 16, 4), SlidingSpec(2, 16, 4, 16)
    specs = {f: [c.spec for c in load(folder_of(f)).cache_layers()] for f in ("llama", "mistral", "qwen2_sliding")}
    assert specs == {"llama": [full] * 4, "mistral": [sliding] * 4, "qwen2_sliding": [full, full, sliding, sliding]}
    gemma = load(folder_of("gemma3"), torch.bfloat16).cache_layers()
    assert [c.spec for c in gemma] == [SlidingSpec(2, 16, 2, 16)] * 3 + [FullSpec(2, 16, 2)]
    assert [c.layer for c in gemma] == [0, 1, 2, 3] and all(c.reads is None for c in gemma)


def test_layer_types_choose_the_sliding_layers(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    folder = make_folder("qwen3", tmp_path, use_sliding_window=True, sliding_window=16, layer_types=kinds)
    model, tokens = load(folder), tokens_of(seed=7, count=60)
    assert [layer.window for layer in model.attention_layers] == [16, None, 16, None]
    assert (all_logits(model, tokens) - hf_logits(folder, tokens)).abs().max() < 1e-4


OLD_ROPES = {
    "llama_linear": {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_llama3": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma3": {
        "rope_theta": 2000.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": None,
        "sliding_window_pattern": 4,
    },
}


@pytest.mark.parametrize("family", OLD_ROPES)
def test_configs_of_older_transformers(tmp_path: Path, family: str) -> None:
    folder = make_folder(family, tmp_path)
    edit_config(folder, rope_parameters=None, **OLD_ROPES[family])
    tokens = tokens_of(seed=8, count=80)
    assert (all_logits(load(folder), tokens) - hf_logits(folder, tokens)).abs().max() < 1e-4


YARN_OPTIONS: list[dict[str, float]] = [
    {"attention_factor": 1.3},
    {"mscale": 1.0, "mscale_all_dim": 0.5},
    {"truncate": False},
]


@pytest.mark.parametrize("extra", YARN_OPTIONS)
def test_yarn_options(tmp_path: Path, extra: dict[str, float]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
    folder = make_folder("llama_yarn", tmp_path, rope_parameters=rope | {"beta_fast": 16.0, "beta_slow": 2.0} | extra)
    tokens = tokens_of(seed=9, count=80)
    assert (all_logits(load(folder), tokens) - hf_logits(folder, tokens)).abs().max() < 1e-4


def test_yarn_extends_the_positions_of_a_config(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 3.0, "original_max_position_embeddings": 64}
    folder = make_folder("llama_yarn", tmp_path, rope_parameters=rope, max_position_embeddings=80)
    model, tokens = load(folder), tokens_of(seed=9, count=150)
    assert model.max_positions == 192
    assert (all_logits(model, tokens) - hf_logits(folder, tokens)).abs().max() < 1e-4


def test_tied_head_shares_the_embedding(folder_of: Folders) -> None:
    tied, untied = load(folder_of("llama_tied")), load(folder_of("llama"))
    assert tied.lm_head.format is tied.embed_tokens.format
    assert tied.lm_head.format.dense().data_ptr() == tied.embed_tokens.weight.data_ptr()
    assert untied.lm_head.format.dense().data_ptr() != untied.embed_tokens.weight.data_ptr()
    assert "lm_head.weight" in untied.weights() and "lm_head.weight" not in tied.weights()


def test_max_len_sets_the_length_of_the_rope_tables(folder_of: Folders) -> None:
    assert load(folder_of("llama")).rotaries[0].table.shape == (512, 16)
    model = load(folder_of("gemma3"), max_len=48)
    assert [rotary.table.shape for rotary in model.rotaries] == [(48, 16)] * 2
    assert model.max_positions == 512
