"""Some steps of TRL's GRPO trainer with the engine in its process, by the alias alone. Prints its log as JSON lines.

    python -m tests.training.grpo_steps FOLDER --steps 3 --sleep
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import outrider.compat

outrider.compat.install_as_vllm()  # before TRL looks for it
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

PROMPTS = ["The sea is", "Count to ten: one, two,", "My favourite colour", "Once upon a time"]


def num_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def train(folder: Path, steps: int, sleeps: bool, max_tokens: int) -> list[dict[str, float]]:
    config = GRPOConfig(
        output_dir=str(folder / "out"), use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=sleeps,
        vllm_max_model_length=128, vllm_gpu_memory_utilization=0.05, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=max_tokens, max_steps=steps, learning_rate=1e-5, use_cpu=True, bf16=False, report_to=[],
        logging_steps=1, save_strategy="no", disable_tqdm=True, model_init_kwargs={"dtype": "float32"})
    trainer = GRPOTrainer(model=str(folder), reward_funcs=num_letters, args=config,
                          processing_class=AutoTokenizer.from_pretrained(folder),
                          train_dataset=Dataset.from_dict({"prompt": PROMPTS}))
    generation: Any = trainer.vllm_generation
    seconds: list[float] = []
    for name in ("sync_weights", "generate"):  # the engine's part of a step
        _time_calls(generation, name, seconds)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "step_time" in log]
    return [*logs, {"engine_seconds": sum(seconds), "weights_version": generation.llm.weights_version}]


def _time_calls(owner: Any, name: str, seconds: list[float]) -> None:
    call = getattr(owner, name)

    def timed(*args: Any, **given: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **given)
        seconds.append(time.perf_counter() - start)
        return result

    setattr(owner, name, timed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=8)
    given = parser.parse_args()
    for log in train(given.folder, given.steps, given.sleep, given.max_tokens):
        print(json.dumps(log))
