"""A proposal of an EAGLE-3 head in one native call gives the drafts, slots and tails of the passes one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from outrider.core import SamplingParams
from outrider.core.draft_confidence import levels_of
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import Drafts, Step
from outrider.drafters.native_chain import NativeChain
from outrider.kernels import cpu as native
from outrider.kernels.cpu import draft_chain
from outrider.kernels.cpu.draft_chain import ChainWeights, DraftChain
from outrider.kernels.quantized import QuantizedRows
from outrider.models.eagle import Eagle3Head
from tests.drafters.checkpoints import DRAFT_VOCAB, HIDDEN, LAYER, eagle3_shapes, random_tensors, write
from tests.engine.harness import CONFIGS, VOCAB, Ask, Rig, prompt_of, random_model

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels")
HEAD_DIM = 16  # heads of the tiny models are too narrow for native attention
# Switches of the config, names of tensors that they ask for beside the usual ones, and their sizes.
FORMS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "plain": ({}, {}),
    "shipped": ({"fc_norm": True, "norm_output": True}, {f"fc_norm.{layer}.weight": (HIDDEN,) for layer in range(3)}),
    "qwen3": ({"model_type": "qwen3", "norm_before_residual": True},
              {f"midlayer.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}),
    "own embedding": ({}, {"embed_tokens.weight": (VOCAB, HIDDEN)}),
}


class BothWays:
    """Runs every proposal in one call and by passes, and compares all that they leave."""

    def __init__(self) -> None:
        self.num_compared, self.longest, self.num_other_levels = 0, 0, 0
        self._propose = AutoregressiveDrafter.propose

    def propose(self, drafter: AutoregressiveDrafter, step: Step) -> Drafts:
        chain, state = drafter._chain, drafter._state
        before = state.valid_from.clone(), state.filled.clone()
        made = self._propose(drafter, step)
        if chain is None:
            return made
        cache = chain._paged.cache
        kept = [x[1:].clone() for x in (drafter._tails, cache.k, cache.v)]
        state.valid_from.copy_(before[0])
        state.filled.copy_(before[1])
        drafter._chain = None
        plain = self._propose(drafter, step)
        drafter._chain = chain
        is_real = step.goes_on[:, None] & (torch.arange(step.num_wanted) < made.counts[:, None])
        assert torch.equal(made.tokens[is_real], plain.tokens[is_real]) and torch.equal(made.counts, plain.counts)
        assert made.levels is not None and plain.levels is not None
        for one, other, count in zip(made.levels.tolist(), plain.levels.tolist(), is_real.sum(1).tolist(), strict=True):
            for level, wanted in zip(levels_of(one, count), levels_of(other, count), strict=True):
                assert abs(level - wanted) <= 1, "they add up in another order"
                self.num_other_levels += level != wanted
        for one, other in zip(kept, (drafter._tails, cache.k, cache.v), strict=True):
            assert torch.equal(one.view(torch.int32), other[1:].view(torch.int32)), "blank pages hold NaN"
        self.num_compared += int(is_real.sum())
        self.longest = max(self.longest, int(step.num_computed.max()))
        return made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("form", FORMS)
def test_the_native_call_drafts_what_the_passes_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str,
                                                      temperature: float) -> None:
    both, is_native = BothWays(), []
    propose = NativeChain.propose

    def noted(chain: NativeChain, step: Step, *args: Any) -> Drafts | None:
        made = propose(chain, step, *args)
        is_native.append((step.batch.padded.num_tokens, made is not None))
        return made

    monkeypatch.setattr(NativeChain, "propose", noted)
    monkeypatch.setattr(AutoregressiveDrafter, "propose", lambda drafter, step: both.propose(drafter, step))
    switches, more = FORMS[form]
    config = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB,
                      "head_dim": HEAD_DIM, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}} | switches
    tensors = random_tensors(eagle3_shapes("midlayer", 3, HEAD_DIM) | more)
    tensors["d2t"] = torch.arange(DRAFT_VOCAB)  # every second token of the target
    drafter = write("eagle3", tmp_path, config, tensors)
    model = random_model(CONFIGS["llama"] | {"head_dim": HEAD_DIM}, torch.float32, 3)
    # Prompts of a few tokens fit into a step with drafts; the last one does not.
    asks = [Ask(prompt_of(length, length), SamplingParams(temperature=temperature, seed=length, max_tokens=20 + length))
            for length in (1, 3, 4, 30)]
    with Rig(model, speculative_config=drafter.speculative(3), max_num_seqs=3, page_size=16) as rig:
        rig.run(asks)
        network = rig.step.drafter
        assert isinstance(network, AutoregressiveDrafter) and isinstance(network.network, Eagle3Head)
    assert both.num_compared > 100 and both.longest >= 3 and both.num_other_levels < both.num_compared // 20
    assert is_native and all(used == (size <= 3 * 4) for size, used in is_native)


def test_a_coarse_output_finds_the_drafts_of_the_whole_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bind, propose = DraftChain.bind, DraftChain.propose
    whole: list[DraftChain] = []
    same: list[bool] = []

    def bind_both(weights: ChainWeights, *cache: torch.Tensor) -> DraftChain | None:
        blocks = torch.from_numpy(quantize(weights.output.data.float().numpy(), GGMLQuantizationType.Q8_0))
        rows = QuantizedRows("Q8_0", blocks).pack()
        weights = weights._replace(output=native.PackedMatrix([rows], None, activation_bits=8))
        for least in (DRAFT_VOCAB + 1, 1):
            monkeypatch.setattr(draft_chain, "MIN_COARSE_OUTPUTS", least)
            found = bind(weights, *cache)
            assert found is not None
            whole.append(found)
        return whole.pop()

    def propose_both(chain: DraftChain, *args: Any, **settings: Any) -> tuple[torch.Tensor, ...]:
        wanted, found = propose(whole[0], *args, **settings), propose(chain, *args, **settings)
        same.append(torch.equal(wanted[0], found[0]) and torch.equal(wanted[2], found[2]))
        return found

    monkeypatch.setattr(DraftChain, "bind", bind_both)
    monkeypatch.setattr(DraftChain, "propose", propose_both)
    config = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB,
                      "head_dim": HEAD_DIM, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}}
    tensors = random_tensors(eagle3_shapes("midlayer", 3, HEAD_DIM)) | {"d2t": torch.arange(DRAFT_VOCAB)}
    drafter = write("eagle3", tmp_path, config, tensors)
    model = random_model(CONFIGS["llama"] | {"head_dim": HEAD_DIM}, torch.float32, 3)
    with Rig(model, speculative_config=drafter.speculative(2), max_num_seqs=2, page_size=16) as rig:
        rig.run([Ask(prompt_of(seed, 9), SamplingParams(temperature=0, max_tokens=30)) for seed in range(4)])
    assert len(same) > 30 and sum(same) >= 0.97 * len(same)


def test_networks_of_other_shapes_are_left_to_the_passes() -> None:
    assert NativeChain.try_build(object(), object(), torch.empty(0)) is None


def test_taps_are_recorded_within_the_native_call_of_all_layers(monkeypatch: pytest.MonkeyPatch,
                                                                tmp_path: Path) -> None:
    """With the bits of auxiliary states between calls of single layers."""
    config = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB,
                      "head_dim": HEAD_DIM, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 0, 1]}}
    tensors = random_tensors(eagle3_shapes("midlayer", 3, HEAD_DIM)) | {"d2t": torch.arange(DRAFT_VOCAB)}
    drafter = write("eagle3", tmp_path, config, tensors)
    model = random_model(CONFIGS["llama"] | {"head_dim": HEAD_DIM, "num_hidden_layers": 4}, torch.float32, 3)
    counts: list[int] = []
    seen: list[tuple[torch.Tensor, ...]] = []
    decoder_layer, propose = native.decoder_layer, AutoregressiveDrafter.propose

    def counted(bound: native.BoundLayer, *args: Any) -> torch.Tensor | None:
        counts.append(bound.count)
        return decoder_layer(bound, *args)

    def noted(drafter: AutoregressiveDrafter, step: Step) -> Drafts:
        seen.append(tuple(each.clone() for each in step.hidden.aux_states))
        return propose(drafter, step)

    def run() -> list[tuple[torch.Tensor, ...]]:
        seen.clear()
        with Rig(model, speculative_config=drafter.speculative(2), max_num_seqs=2, page_size=16) as rig:
            rig.run([Ask(prompt_of(seed, 9), SamplingParams(temperature=0, max_tokens=8)) for seed in range(2)])
        return list(seen)

    monkeypatch.setattr(AutoregressiveDrafter, "propose", noted)
    monkeypatch.setattr(native, "decoder_layer", counted)
    together = run()
    assert counts and set(counts) == {4}
    monkeypatch.setattr(native, "decoder_layer", lambda *args: None)
    in_parts = run()
    assert len(together) == len(in_parts) > 4
    for one, other in zip(together, in_parts, strict=True):
        assert len(one) == 3 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
