"""The examples of docs/images.md, run with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import outrider
from tests.compat.doc_blocks import all_blocks
from tests.images.recipes import PROCESSOR_CONFIG, RECIPES, SOFT
from tests.server.test_seeing_models import SETTINGS, save_tokenizer

BLOCKS = [block for block in all_blocks() if block.page == "docs/images.md"]


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    recipe = RECIPES["qwen3_vl"]
    folder = recipe.save(tmp_path / "model")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR_CONFIG["qwen3_vl"]))
    save_tokenizer(folder, recipe.place)
    made, names = outrider.LLM, []

    def tiny(name: str, **settings: Any) -> outrider.LLM:
        names.append(name)
        return made(str(folder), **(SETTINGS | settings))

    monkeypatch.setattr(outrider, "LLM", tiny)
    monkeypatch.chdir(tmp_path)
    Image.fromarray(recipe.image(3, (5, 4))).resize((90, 77)).save("receipt.png")
    first, second = (block.rest for block in BLOCKS)
    given: dict[str, Any] = {}
    exec(first, given)
    assert names == ["Qwen/Qwen3-VL-8B-Instruct"] and capsys.readouterr().out.strip()
    given |= {"ids": [5, *recipe.place, 6, *recipe.place, 7], "first": Image.open("receipt.png"),
              "second": np.asarray(recipe.image(1, (2, 3)))}
    (output,) = eval(second, given)
    assert output.prompt_token_ids.count(SOFT) > 6 + 1 and output.outputs[0].token_ids
    given["llm"].close()
