"""bench/export_folder.py: a GGUF file or a folder saved as a Hugging Face folder is the same model."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.engine.text import Tokenizer
from outrider.models.sources import gguf_source, resolve
from tests.engine.harness import CONFIGS, byte_tokenizer, prompt_of, save_folder
from tests.unit.test_sources import write_gguf
from tests.unit.test_text import gguf_metadata, trained

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.export_folder import export_folder

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_pages": 20}


def tokens(model: Path) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt_of(seed, 9, vocab=32)} for seed in range(2)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in LLM(str(model), **SETTINGS).generate(prompts, params)]


def test_a_gguf_file_becomes_a_folder_with_the_same_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "Q8_0")
    with pytest.MonkeyPatch.context() as patch:
        from tokenizers import pre_tokenizers

        source: Any = gguf_source(tmp_path / "m.gguf")
        backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
        metadata = gguf_metadata(backend, "gpt-2", **{"tokenizer.chat_template": "{{ messages[0].content }}"})
        header = dataclasses.replace(source.header, metadata=source.header.metadata | metadata)
        files = export_folder(dataclasses.replace(source, header=header), tmp_path / "out")
        patch.setitem(sys.modules, "gguf", None)  # as on a machine without it
        assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        made = tokens(tmp_path / "out")
    assert made == tokens(tmp_path / "m.gguf")
    assert resolve(tmp_path / "out").eos_token_ids == (2, 5)
    ours, theirs = Tokenizer.load(tmp_path / "out"), Tokenizer.load(metadata)
    assert ours.encode("the cat sat 1234") == theirs.encode("the cat sat 1234")
    assert ours.chat_templates == theirs.chat_templates and ours.special_tokens == theirs.special_tokens


def test_a_folder_is_copied_in_another_dtype(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "in", CONFIGS["gemma3"])
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    assert "tokenizer.json" in export_folder(resolve(folder), tmp_path / "out", "bfloat16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["Gemma3ForCausalLM"]
    rounded = dict(resolve(tmp_path / "out").tensors())
    assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in resolve(folder).tensors())
    with pytest.raises(ValueError, match="is not empty"):
        export_folder(resolve(folder), tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    export_folder(resolve(folder), tmp_path / "out")
    assert tokens(tmp_path / "out") == tokens(folder)


def test_matrices_in_fp8_blocks_are_read_as_such(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "in", CONFIGS["llama"])
    export_folder(resolve(folder), tmp_path / "out", fp8_blocks=True)
    before, after = dict(resolve(folder).tensors()), dict(resolve(tmp_path / "out").tensors())
    name = "model.layers.0.mlp.down_proj"
    stored = resolve(tmp_path / "out").stored_format(name)
    assert stored is not None and stored.kind == "fp8" and resolve(folder).stored_format(name) is None
    assert before.keys() == after.keys() and torch.equal(before["model.embed_tokens.weight"].float(),
                                                         after["model.embed_tokens.weight"].float())
    numbers = before[f"{name}.weight"].float()
    error = (after[f"{name}.weight"].float() - numbers).abs() / numbers.abs().amax()
    assert 0 < error.max() < 2**-4
