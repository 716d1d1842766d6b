"""A prompt with an adapter (LoRA) beside the same prompt without: python examples/adapter.py [MODEL [ADAPTER_FOLDER]]

Without a folder one is written with random numbers, in PEFT's form: it teaches nothing, and shows what a folder holds.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider import LLM, SamplingParams
from outrider.adapters import LoRARequest

RANK = 4


def write_random_adapter(folder: Path, hidden_size: int, num_layers: int) -> None:
    """Two factors for the output projection of each attention layer of a Llama model."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        width = 0.5 * hidden_size**-0.5
        tensors[f"{name}.lora_A.weight"] = width * torch.randn(RANK, hidden_size, generator=generator)
        tensors[f"{name}.lora_B.weight"] = width * torch.randn(hidden_size, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 16 * RANK}))


model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
given = sys.argv[2] if len(sys.argv) > 2 else None
with LLM(model, enable_lora=True) as llm, tempfile.TemporaryDirectory() as new:
    if not given:
        config = llm.llm_engine.model_config.hf_config
        write_random_adapter(Path(new), config.hidden_size, config.num_hidden_layers)
    adapter = LoRARequest("mine", 1, given or new)
    params = SamplingParams(temperature=0, max_tokens=40)
    with_adapter, without = llm.generate(["The sea is"] * 2, params, lora_request=[adapter, None])  # in one batch
    print("without:", without.outputs[0].text)
    print("with the adapter:", with_adapter.outputs[0].text)
