"""The embedded default model, for real: GGUF against a Hugging Face folder, both against transformers.

Fetches the model (93 MB) if it is not in the cache; takes a minute or two, so it belongs to the long tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider import LLM, SamplingParams
from outrider.core.shipped_drafters import SHIPPED
from outrider.models.sources import ModelSource, resolve

pytestmark = pytest.mark.long

PROMPTS = [
    "The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village by the sea,",
    "The three laws of motion are", "To make a good cup of tea you need", "In 1969, people first", "Water boils at",
    "Dear Sir or Madam,", "The quick brown fox", "A list of the planets, from the sun outwards:",
]
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve("smollm2")


@pytest.fixture(scope="module")
def folder(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dequantised weights as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("smollm2")
    (path / "config.json").write_text(json.dumps(source.config))
    save_file({name: tensor.contiguous() for name, tensor in source.tensors()}, path / "model.safetensors")
    return path


def generate(model: str, prompts: list[Any]) -> list[list[int]]:
    with LLM(model, max_model_len=512, max_num_batched_tokens=64, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_gguf_and_folder_and_transformers_give_the_same_tokens(source: ModelSource, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with LLM("smollm2", max_model_len=512) as llm:
        prompts = [llm.get_tokenizer().encode(text) for text in PROMPTS]
    ours = generate("smollm2", prompts)
    assert ours == generate(str(folder), prompts)
    oracle = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    oracle.load_state_dict(dict(source.tensors()), strict=False)
    oracle.tie_weights()
    oracle.generation_config.eos_token_id = None  # goes on after an end of text, as ignore_eos does
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                                 pad_token_id=0)
        assert tokens == theirs[0, len(prompt) :].tolist()


def test_exact_mode_keeps_every_bit_of_real_weights() -> None:
    """Alone, and in chunks with batch mates and drafts: the log-probabilities of the 20 likeliest tokens are equal."""
    params = [SamplingParams(temperature=0.8 * (i % 2), top_p=0.9, seed=i, max_tokens=24, logprobs=20, ignore_eos=True)
              for i in range(4)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
    found = []
    for settings in ({"max_num_seqs": 1, "enable_prefix_caching": False},
                     {"max_num_seqs": 4, "max_num_batched_tokens": 19, "speculative_config": ngram}):
        with LLM("smollm2", max_model_len=128, dtype="float32", exact=True, **settings) as llm:
            outputs = [output.outputs[0] for output in llm.generate(PROMPTS[:4], params, use_tqdm=False)]
        found.append([(sample.token_ids, [{token: entry.logprob for token, entry in place.items()}
                                          for place in sample.logprobs or []]) for sample in outputs])
    assert found[0] == found[1]


def test_the_drafter_that_comes_with_the_model_is_used_by_default_and_changes_no_text() -> None:
    """Mean run of fixed counts on texts that it was not trained on; sampled text too."""
    questions = ["Why is the sky blue?", "Write a short story about a lighthouse.", "How do I boil an egg?"]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=64) for t in (0.0, 0.0, 0.8)]
    found = []
    for config in (None, "auto", {**SHIPPED["smollm2"].speculative_config, "auto": False}):
        with LLM("smollm2", max_model_len=256, max_num_seqs=3, speculative_config=config) as llm:
            conversations = [[{"role": "user", "content": text}] for text in questions]
            outputs = llm.chat(conversations, params, use_tqdm=False)
            assert (llm.engine.runner.device_step.drafter is None) == (config is None)  # type: ignore[attr-defined]
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] == found[2]
    num_tokens, num_steps = (sum(counts) for counts in zip(
        *((len(output.outputs[0].token_ids), output.metrics.num_steps) for output in outputs), strict=True))
    assert num_tokens / num_steps > 1.8
