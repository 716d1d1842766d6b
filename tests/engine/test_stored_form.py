"""A form of files that a caller names is held against the files before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.compat.engine_args import config_for
from outrider.config import FILE_FORMS, EngineConfig
from outrider.engine.load import find_model
from outrider.models.sources.folder import FolderSource
from outrider.models.sources.stored_form import HOLDS, check_form
from tests.engine.harness import CONFIGS


def folder(path: Path, form: str | None) -> Path:
    section: dict[str, Any] = {} if form is None else {"quantization_config": {"quant_method": form}}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS["llama"] | section))
    return path


def find(path: Path, quantization: str) -> None:
    find_model(EngineConfig(str(path), quantization=quantization, load_format="dummy"))


def source(form: str | None) -> FolderSource:
    return FolderSource("m", Path("m"), {} if form is None else {"quantization_config": {"quant_method": form}}, ())


@pytest.mark.parametrize("name", FILE_FORMS)
def test_files_must_be_of_the_form_that_is_named(name: str) -> None:
    for form in {*FILE_FORMS.values(), None} - {"gguf", FILE_FORMS[name]}:
        with pytest.raises(ValueError, match=f"^quantization='{name}': the files of m are .*: leave quantization out"):
            check_form(name, source(form))
    if FILE_FORMS[name] != "gguf":
        check_form(name, source(FILE_FORMS[name]))
    assert config_for("LLM", "m", {"quantization": name}).quantization == name


@pytest.mark.parametrize("made", HOLDS)
def test_quantised_files_are_not_quantised_again(made: str) -> None:
    for form in (None, *HOLDS[made]):
        check_form(made, source(form))
    with pytest.raises(ValueError, match=f"^quantization='{made}': the files of m are quantised already"):
        check_form(made, source("mxfp4"))


def test_an_engine_asks_before_it_reads_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantization='awq': the files of plain are numbers that are not quantised"):
        find(folder(tmp_path / "plain", None), "awq")
    with pytest.raises(ValueError, match="quantization='awq': the files of other are of the form 'gptq'"):
        find(folder(tmp_path / "other", "gptq"), "awq")
    find(folder(tmp_path / "right", "awq"), "awq_marlin")
