"""The core without its features: a copy of the package that lacks a feature's folder imports, serves the same tokens,
and refuses by name what only the feature can do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.feature_list import FEATURES

PACKAGE = Path(__file__).parents[2] / "outrider"
FOLDERS = {  # of FEATURES, by their names
    "adapters": "adapters",
    "logits processors": "processors",
    "drafter that learns": "learning",
    "grammars": "grammars",
    "pooling": "pooling",
    "bidirectional spans": "spans",
    "prompt embeddings": "embeddings",
    "receipts": "receipts",
    "routed experts": "routing",
    "sampling masks": "masks",
    "images": "images",
    "cache beyond the device": "tiers",
}
SETTINGS: dict[str, dict[str, Any]] = {  # that ask for a feature
    "adapters": {"enable_lora": True},
    "drafter that learns": {"speculative_config": {"method": "eagle3", "model": "tiny", "num_speculative_tokens": 2},
                            "adapt_drafter": True},
    "routed experts": {"enable_return_routed_experts": True},
    "cache beyond the device": {"disk_cache_dir": "cache"},
    "logits processors": {"logits_processors": ["outrider.logits_processors:LogitsProcessor"]},
}
REQUESTS = {  # that ask for the other features
    "grammars": "llm.generate('The sea is', form)",
    "pooling": "llm.encode('The sea is', PoolingParams())",
    "receipts": "llm.generate('The sea is', SamplingParams(receipt=True))",
    "sampling masks": "llm.generate('The sea is', SamplingParams(top_k=5, return_sampling_mask=True))",
    "bidirectional spans": "llm.generate({'prompt': 'The sea is', 'bidirectional_spans': [[0, 2]]})",
    "images": "llm.generate({'prompt': 'The sea is', 'multi_modal_data': {'image': numpy.zeros((4, 4, 3))}})",
    "prompt embeddings": "llm.generate({'prompt_embeds': numpy.zeros((2, 576))})",
}

PROGRAM = """
import importlib, json, pkgutil, sys, types
import numpy, outrider
for module in pkgutil.walk_packages(outrider.__path__, "outrider."):
    if not module.name.endswith("__main__") and ".compat.modules" not in module.name:
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert not str(error.name).startswith("outrider"), (module.name, error)  # an extra that is not installed
from outrider import LLM, PoolingParams, SamplingParams, StructuredOutputsParams
from outrider.config import EngineConfig
from outrider.feature_list import worker_features
settings, request = json.loads(sys.argv[1])
refusal, form = "", SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
try:
    worker_features(EngineConfig("tiny", **settings), types.SimpleNamespace(sees=False))
except ValueError as error:
    refusal = str(error)
with LLM("smollm2", max_model_len=256) as llm:
    try:
        exec(request)
    except ValueError as error:
        refusal = str(error)
    (output,) = llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(json.dumps([outrider.__file__, refusal, output.outputs[0].token_ids]))
"""


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    """The tokens of the whole package."""
    with LLM("smollm2", max_model_len=256) as llm:
        (output,) = llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("feature", [entry.name for entry in FEATURES])
def test_the_core_serves_without_the_folder_of_a_feature(feature: str, wanted: list[int], tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", FOLDERS[feature])

    def leaves_out(folder: str, names: list[str]) -> set[str]:
        return ignored(folder, names) if folder.endswith("features") else {"__pycache__"}

    shutil.copytree(PACKAGE, tmp_path / "outrider", ignore=leaves_out)
    assert not (tmp_path / "outrider" / "features" / FOLDERS[feature]).exists()
    asked = json.dumps([SETTINGS.get(feature, {}), REQUESTS.get(feature, "")])
    done = subprocess.run([sys.executable, "-c", PROGRAM, asked], cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    place, refusal, tokens = json.loads(done.stdout.splitlines()[-1])
    assert place == str(tmp_path / "outrider" / "__init__.py"), "the copy is what ran"
    assert f"this installation of outrider cannot use {feature}" in refusal
    assert tokens == wanted
