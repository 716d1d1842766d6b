"""Routed experts: the experts that transformers' routers choose for every token, with drafts, chunks, preemptions and
stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core.outputs import RequestOutput
from tests.engine.harness import prompt_of
from tests.models.oracle import hf_model, make_folder

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
ENGINE: dict[str, Any] = {"device": "cpu", "max_model_len": 96, "max_num_seqs": 4, "num_pages": 96, "dtype": "float64",
                          "skip_tokenizer_init": True, "max_num_batched_tokens": 24,
                          "enable_return_routed_experts": True}
SHARED = prompt_of(0, 34)
PROMPTS = [[*SHARED, *prompt_of(index, 3 + index)] for index in range(3)]
CHOSEN: list[dict[str, Any]] = [{"allowed_token_ids": [4, 5]}, {"n": 2}, {}]
PARAMS = [SamplingParams(temperature=1, seed=index, max_tokens=16, ignore_eos=True, **own)
          for index, own in enumerate(CHOSEN)]
FAMILIES = ["qwen3_moe_mixed", "mixtral", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next"]


@torch.inference_mode()
def experts_of_transformers(model: Any, ids: Sequence[int], num_layers: int) -> list[list[set[int]]]:
    """The experts that transformers' own routers choose, by token and layer; empty for a layer without a router."""
    found: list[list[set[int]]] = [[set()] * num_layers for _ in ids]
    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            layer = int(name.split("layers.")[1].split(".")[0])

            def note(module: Any, given: Any, out: Any, layer: int = layer) -> None:
                for token, chosen in enumerate(out[-1].tolist()):
                    found[token][layer] = set(chosen)

            hooks.append(module.register_forward_hook(note))
    assert hooks
    model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return found


def assert_experts_equal(model: Any, output: RequestOutput) -> None:
    for sample in output.outputs:
        ids, given = [*output.prompt_token_ids, *sample.token_ids], sample.routed_experts
        assert given is not None and given.dtype == np.uint8 and given.shape[0] == len(ids) - 1
        wanted = experts_of_transformers(model, ids[:-1], given.shape[1])
        for own, layers in zip(given.tolist(), wanted, strict=True):
            for chosen, others in zip(own, layers, strict=True):
                assert set(chosen) == (others or {0})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = make_folder(family, tmp_path / family)
    model = hf_model(folder, attn_implementation="eager", experts_implementation="eager").double()
    with LLM(str(folder), speculative_config=DRAFTS, **ENGINE) as llm:
        outputs = [output for _ in range(2) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        stopping = SamplingParams(temperature=1, seed=0, max_tokens=16, allowed_token_ids=[4, 5],
                                  stop_token_ids=[outputs[0].outputs[0].token_ids[5]])
        outputs += llm.generate(PROMPTS[:1], stopping, use_tqdm=False)
    assert sum(output.metrics.num_accepted_tokens for output in outputs)
    assert not any(output.num_cached_tokens for output in outputs), "a hit has no experts"
    for output in outputs:
        assert_experts_equal(model, output)


def test_preempted_requests_have_the_experts_of_all_tokens(tmp_path: Path) -> None:
    folder = make_folder("mixtral", tmp_path / "model")
    model = hf_model(folder, attn_implementation="eager", experts_implementation="eager").double()
    with LLM(str(folder), **ENGINE | {"num_pages": 8, "max_model_len": 72}) as llm:
        params = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True)
        outputs = llm.generate([prompt[-9:] for prompt in PROMPTS], params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs)
    for output in outputs:
        assert_experts_equal(model, output)


def test_without_the_setting_samples_have_none(tmp_path: Path) -> None:
    folder = make_folder("qwen3_moe_mixed", tmp_path / "model")
    with LLM(str(folder), **ENGINE | {"enable_return_routed_experts": False}) as llm:
        (output,) = llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)
    assert output.outputs[0].routed_experts is None and dict(output.outputs[0].extras) == {}


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enable_return_routed_experts: no layer of this model has a router"):
        LLM(str(make_folder("llama", tmp_path / "llama")), **ENGINE)
