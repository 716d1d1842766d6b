"""`outrider train-drafter` on a small target: the head drafts well, and the files are those that engines load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM, SamplingParams, cli
from outrider.core.outputs import RequestOutput
from tests.training.runs import ASSETS, ENGINE, prompts_of, write_prompts

NUM_DRAFTS = 2
NAMES = {
    "fc.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head trained by the command."""
    path = tmp_path_factory.mktemp("trained")
    prompts = write_prompts(path / "prompts.jsonl", prompts_of("target", 160))
    flags = {"out": path / "head", "prompts": prompts, "max-prompt-tokens": 24, "max-answer-tokens": 40,
             "taps": "1,2,4", "draft-vocab-size": 64, "batch-tokens": 384, "micro-tokens": 384, "epochs": 5,
             "learning-rate": 8e-3,
             "passes": NUM_DRAFTS, "evaluations": 3, "dtype": "float32", "device": "cpu", "num-pages": 300}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    assert cli.main(["train-drafter", str(ASSETS / "target"), *words]) == 0
    return path / "head"


def mean_run(speculative: dict[str, Any] | None) -> tuple[float, list[list[int]]]:
    """The mean run on prompts that were not trained on, and the tokens."""
    if speculative is not None:
        speculative = speculative | {"num_speculative_tokens": NUM_DRAFTS, "auto": False}
    params = SamplingParams(temperature=0, max_tokens=32, detokenize=False)
    with LLM(str(ASSETS / "target"), dtype="float32", skip_tokenizer_init=True, speculative_config=speculative,
             **ENGINE) as llm:
        outputs: list[RequestOutput] = llm.generate(prompt_token_ids=prompts_of("target", 16, seed=1234),
                                                    sampling_params=params, use_tqdm=False)
    steps = sum(output.metrics.num_steps for output in outputs)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, tokens)) / steps, tokens


def test_the_heads_mean_run_is_far_above_that_of_ngrams(folder: Path) -> None:
    plain, text = mean_run(None)
    ngram, _ = mean_run({"method": "ngram"})
    head, same = mean_run({"method": "eagle3", "model": str(folder)})
    assert plain == 1 and same == text
    assert head >= ngram + 0.5, (head, ngram)
    assert head > 2.2


def test_the_file_has_the_names_that_engines_load(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == NAMES | {f"fc_norm.{index}.weight" for index in range(3)}
    ids = torch.arange(64) + tensors["d2t"]
    assert tensors["d2t"].dtype == torch.int64 and bool((ids[1:] > ids[:-1]).all())
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero()[:, 0].equal(ids)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 1 and config["draft_vocab_size"] == 64 and config["vocab_size"] == 128
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    assert "tokens a step" in (folder / "README.md").read_text()


def test_the_vocabulary_holds_what_the_target_says(folder: Path) -> None:
    """The language has 64 symbols, scattered over 128 ids; only they are said."""
    from tests.assets.train_eagle3 import language

    tensors = load_file(folder / "model.safetensors")
    assert tensors["t2d"].nonzero()[:, 0].equal(language().symbols)
