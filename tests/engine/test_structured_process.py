"""Structured output with the worker in a process of its own, as a server runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams, StructuredOutputsParams
from outrider.config import EngineConfig
from outrider.engine.start import start_engine
from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder, tokens_of

pytest.importorskip("llguidance")

END = 257
SETTINGS: dict[str, Any] = {"dtype": "float64", "device": "cpu", "max_model_len": 96, "num_pages": 64,
                            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "auto": False}}
PATTERN = r"[a-f]{3,6}-\d{2}"


def test_the_child_compiles_grammars_and_follows_them(tmp_path: Path) -> None:
    path = save_folder(tmp_path / "tiny", CONFIGS["llama"] | {"vocab_size": 259, "eos_token_id": END}, seed=5)
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    form = StructuredOutputsParams(regex=PATTERN)
    params = [SamplingParams(temperature=0.9, seed=1, max_tokens=20, structured_outputs=form),
              SamplingParams(temperature=0, max_tokens=8)]
    found = []
    for in_process in (False, True):
        engine = start_engine(EngineConfig(str(path), **SETTINGS), in_process=in_process)
        with LLM.around(engine) as llm:
            outputs = llm.generate(["The sea is", "A tide is"], params)
            assert re.fullmatch(PATTERN, outputs[0].outputs[0].text)
            with pytest.raises(ValueError, match="structured_outputs.regex cannot be compiled"):
                llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))
            found.append((tokens_of(outputs), outputs[0].metrics.num_accepted_tokens))
    assert found[0] == found[1] and found[0][1] > 0
