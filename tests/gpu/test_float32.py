"""Float32 on the card is float32: log-probabilities differ from those of float64 by rounding alone.

Products of float32 operands that a card rounds to ten bits first (TF32) would show here as differences of 1e-3. Heads
are as wide as Gemma 4's. Its scores are not divided by the square root of the head size, so random weights make
attention so sharp that it magnifies rounding tenfold in every few layers, in any implementation. The queries are
therefore scaled down here.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.outputs import RequestOutput
from tests.engine.harness import Ask
from tests.gpu.rig import GpuRig, asks, assert_same_tokens, loaded, reference, scratch
from tests.gpu.test_engines import folder_of
from tests.models import gemma4

NUM_LOGPROBS = 100
TOLERANCE = 1e-4  # nats; TF32 gives 1e-3 to 1e-2


@functools.cache
def wide_gemma4() -> Path:
    """A tiny Gemma 4 with heads of 256 in sliding layers and of 512 in full ones."""
    import transformers

    heads = {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.Gemma4ForCausalLM(gemma4.text_config(gemma4.TARGETS["dense"] | heads, unified=False))
    gemma4.spread(model, "wide")
    for name, value in model.state_dict().items():
        if name.endswith("q_norm.weight"):
            value.mul_(value.shape[0] ** -0.5)
    model.save_pretrained(scratch() / "gemma4_wide")
    return scratch() / "gemma4_wide"


FOLDERS = {"llama": functools.partial(folder_of, "llama"), "gemma4 wide": wide_gemma4}


@pytest.mark.gpu
@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.together(name)) for name in FOLDERS])
def test_logprobs_in_float32_are_those_of_float64(family: str) -> None:
    folder = FOLDERS[family]()
    expected = reference(folder)
    asked = [Ask(ask.prompt, replace(ask.params, logprobs=NUM_LOGPROBS)) for ask in asks()]
    with GpuRig(loaded(folder), source=folder) as rig:
        outputs = rig.run(asked)
    assert_same_tokens(outputs, expected, asked)
    furthest = max(distance(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))
    assert furthest < TOLERANCE, f"{furthest:.1e} nats apart"


def distance(ours: RequestOutput, theirs: RequestOutput) -> float:
    """The greatest difference of two log-probabilities, up to where the texts part."""
    mine, right = ours.outputs[0], theirs.outputs[0]
    assert mine.logprobs is not None and right.logprobs is not None
    furthest = 0.0
    for position, (entries, wanted) in enumerate(zip(mine.logprobs, right.logprobs, strict=True)):
        assert len(entries) >= NUM_LOGPROBS
        furthest = max(furthest, *(abs(entry.logprob - wanted[token].logprob) for token, entry in entries.items()))
        if mine.token_ids[position] != right.token_ids[position]:
            break
    return furthest
