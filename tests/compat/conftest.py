"""A tiny chat model whose tokens are bytes, for scripts as vLLM's users write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
            "{% if enable_thinking %}(think){% endif %}{% if add_generation_prompt %}<assistant>{% endif %}")

# Start-up and shut-down are the same in every script, so one engine serves those that need no settings of their own.
SETTINGS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "num_pages": 96}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("models") / "tiny",
                       CONFIGS["llama"] | {"vocab_size": 259, "eos_token_id": 257}, seed=5)
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def names(model: Path) -> Any:
    from outrider import LLM, SamplingParams

    with LLM(model=str(model), **SETTINGS, trust_remote_code=True, enforce_eager=True, dtype="float32") as llm:
        yield {"LLM": LLM, "SamplingParams": SamplingParams, "llm": llm, "model": str(model), "math": math}
        assert not llm.engine.has_work
