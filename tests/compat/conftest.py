"""A tiny chat model whose tokens are bytes, for scripts as vLLM's users write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
            "{% if enable_thinking %}(think){% endif %}{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("models") / "tiny",
                       CONFIGS["llama"] | {"vocab_size": 259, "eos_token_id": 257}, seed=5)
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path
