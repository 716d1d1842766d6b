"""TRL's trainers run with the engine in their process, by the alias alone, and the ratio of each sample is 1.

The ratio compares the trainer's log-probabilities of the sampled tokens with the engine's. `make test-trl` installs
TRL; without it the calls that its GRPO trainer makes are replayed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.models.sources import resolve
from tests.engine.harness import byte_tokenizer
from tests.server.rig import serving

ROOT = Path(__file__).parents[2]
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: make test-trl")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model with a tokenizer that transformers reads."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    backend = byte_tokenizer().backend
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=backend.id_to_token(1),
                                        pad_token=backend.id_to_token(0))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=backend.get_vocab_size(), hidden_size=64, intermediate_size=128,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1,
                         max_position_embeddings=256, pad_token_id=0, bos_token_id=None, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run_steps(folder: Path, *flags: str) -> tuple[list[dict[str, float]], dict[str, float]]:
    """(log of each step, what the engine has done)"""
    done = subprocess.run([sys.executable, "-m", "tests.training.grpo_steps", str(folder), *flags], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *logs, engine = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    for log in logs:
        assert all(abs(log[f"sampling/importance_sampling_ratio/{name}"] - 1) < 1e-4 for name in ("min", "max")), log
    return logs, engine


@needs_trl
@pytest.mark.parametrize("flags", [(), ("--sleep",)], ids=["awake", "with sleep"])
def test_a_step_of_grpo(tiny: Path, flags: tuple[str, ...]) -> None:
    logs, engine = run_steps(tiny, *flags)
    assert len(logs) == 1 and logs[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert engine["weights_version"] >= 1


@needs_trl
@pytest.mark.long
def test_three_steps_of_grpo_on_smollm2_with_sleep(tmp_path: Path) -> None:
    from bench.export_folder import export_folder

    export_folder(resolve("smollm2"), tmp_path / "smollm2", "float32")
    logs, engine = run_steps(tmp_path / "smollm2", "--steps", "3", "--sleep", "--max-tokens", "32")
    assert len(logs) == 3 and engine["weights_version"] >= 3


@needs_trl
def test_trls_client_gives_weights_to_a_server_and_samples_from_it(tiny: Path) -> None:
    """TRL's client of a server, unmodified. It looks at nothing of the device but the word cuda."""
    import outrider.compat

    outrider.compat.install_as_vllm()
    from transformers import AutoModelForCausalLM
    from trl.generation.vllm_client import VLLMClient

    from outrider.compat.network import get_open_port

    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    settings = {"max_model_len": 64, "num_pages": 64, "logprobs_mode": "processed_logprobs", "max_logprobs": -1}
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    with serving(lambda: AsyncLLM(str(tiny), **settings), admin=True,
                 weight_transfer_config={"backend": "nccl"}) as served:
        client = VLLMClient(base_url=str(served.http.base_url), group_port=get_open_port())
        client.init_communicator(device="cuda")
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
            client.update_model_params(model)
            client.reset_prefix_cache()
            found = client.generate(prompts, n=2, max_tokens=8, temperature=1.0, logprobs=0)
            for index, ids in enumerate(found["completion_ids"]):
                theirs = scores_of(model, prompts[index // 2], ids)
                ours = sum(each[0] for each in found["logprobs"][index])
                assert math.exp(theirs - ours) == pytest.approx(1, abs=1e-4)
        scored = client.get_sequence_logprobs([prompts[1] + [12, 13]], [4], top_logprobs=-1)
        ours = sum(each[0] for each in scored["actual_logprobs"][0])
        assert ours == pytest.approx(scores_of(model, prompts[1], [12, 13]), abs=1e-4)
        client.close_communicator()


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_calls_of_a_step_of_grpo(tiny: Path, sleeps: bool) -> None:
    """The calls of TRL 1.16, in its order, over two updates."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    settings: dict[str, Any] = {
        "tensor_parallel_size": 1, "gpu_memory_utilization": 0.05, "max_model_len": 64, "max_num_seqs": 4,
        "enable_sleep_mode": sleeps, "model_impl": "vllm", "distributed_executor_backend": "external_launcher",
        "seed": 0, "max_num_batched_tokens": 4096, "logprobs_mode": "processed_logprobs", "quantization": None,
        "trust_remote_code": False}
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    with LLM(model=str(tiny), **settings) as llm:
        assert llm.llm_engine.model_config.max_model_len == 64
        if sleeps:
            llm.sleep(level=2)
        for version in (1, 2):
            with torch.no_grad():  # a step of the optimiser
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
            if sleeps:
                llm.wake_up(tags=["weights"])
            for name, parameter in model.named_parameters():
                llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(name, parameter)])
            llm.reset_prefix_cache()
            if sleeps:
                llm.wake_up(tags=["kv_cache"])
            params = SamplingParams(n=1, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
                                    max_tokens=8, logprobs=0)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling_params=params,
                                   use_tqdm=False)
            if sleeps:
                llm.sleep(level=2)
            for output in outputs:
                (sample,) = output.outputs
                assert sample.weight_versions == [(version, 0, len(sample.token_ids))]
                assert ratio(model, output.prompt_token_ids, sample) == pytest.approx(1, abs=1e-4)


def ratio(model: Any, prompt: list[int], sample: Any) -> float:
    """The importance ratio of a sample: the trainer's probability over the engine's."""
    ours = sum(entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True))
    return math.exp(scores_of(model, prompt, sample.token_ids) - ours)


def scores_of(model: Any, prompt: list[int], token_ids: list[int]) -> float:
    """The trainer's log-probability of a sample."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1)[range(len(token_ids)), token_ids].sum())
