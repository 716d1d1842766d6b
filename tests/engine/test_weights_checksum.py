"""Checksums of weights: those of the checkpoint's tensors, however the weights came."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM
from outrider.compat.engine_args import config_for
from outrider.engine.start import start_engine
from outrider.runner.commands import WeightsIncomplete
from tests.engine.harness import with_other_weights
from tests.engine.test_update_weights import CODED, FOLDERS, NAME, SETTINGS, generated, llama
from tests.models import quantized_files
from tests.models.oracle import make_folder

Tensors = dict[str, torch.Tensor]


def sha256(tensor: torch.Tensor) -> str:
    """What a trainer computes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def of_file(folder: Path) -> dict[str, str]:
    return {name: sha256(tensor.float()) for name, tensor in load_file(folder / "model.safetensors").items()}


def checksums(llm: LLM) -> dict[str, str]:
    return {name: tensor.sha256 for name, tensor in llm.weights_checksum().tensors.items()}


HEAD_LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "queries and gates, head by head": lambda path: make_folder("qwen3_next", path / "model"),
    "pairs that rope turns": lambda path: make_folder("deepseek_v32", path / "model"),
    "states": lambda path: FOLDERS["states, mtp"](path)[0],
    "a tied head": lambda path: FOLDERS["tied head"](path)[0],
}


@pytest.mark.parametrize("case", HEAD_LAYOUTS)
def test_checksums_are_those_of_the_files_tensors(case: str, tmp_path: Path) -> None:
    folder = HEAD_LAYOUTS[case](tmp_path)
    stored = of_file(folder)
    with LLM(str(folder), **SETTINGS) as llm:
        found = llm.weights_checksum()
        assert len(found.tensors) > 5 and not found.coded
        own = {name: tensor.sha256 for name, tensor in found.tensors.items() if name in stored}
        assert own and {name: stored[name] for name in own} == own
        apart = found.tensors.keys() - own.keys()
        assert all(".experts." in name for name in apart), "the files hold them in one tensor of all experts"


def test_equal_bits_have_equal_checksums_however_they_came(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    other = with_other_weights(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    expected = of_file(other)
    with LLM(str(other), **SETTINGS) as llm:
        from_start = llm.weights_checksum()
        tokens = generated(llm)
    assert {name: own.sha256 for name, own in from_start.tensors.items()} == expected
    with LLM(str(folder), **SETTINGS) as llm:
        first = llm.weights_checksum()
        assert first.sha256 != from_start.sha256 and first.differences(of_file(folder)) == []

        def alone() -> None:
            for pair in tensors.items():
                llm.load_weights([pair])

        def in_chunks() -> None:
            llm.start_weight_update()
            pairs = list(tensors.items())
            for start in range(0, len(pairs), 4):
                llm.load_weights(pairs[start : start + 4])
            with pytest.raises(ValueError, match="is in progress"):
                llm.weights_checksum()
            llm.finish_weight_update()

        for update in (alone, in_chunks, lambda: llm.update_weights(other), lambda: llm.update_weights(tensors)):
            update()
            assert llm.weights_checksum() == from_start and llm.weights_checksum().sha256 == from_start.sha256
            assert generated(llm) == tokens
            llm.update_weights(folder)
            assert llm.weights_checksum() == first
        llm.load_weights({NAME: tensors[NAME]})
        assert llm.weights_checksum().differences(of_file(folder)) == [NAME]
        llm.sleep()
        with pytest.raises(ValueError, match="the weights are asleep"):
            llm.weights_checksum()
        llm.wake_up()
        llm.load_weights({NAME: tensors[NAME]})
        with pytest.raises(WeightsIncomplete):
            llm.load_weights([("model.extra", tensors[NAME])])
        with pytest.raises(WeightsIncomplete, match="the weights are incomplete"):
            llm.weights_checksum()


def test_a_worker_in_a_process_computes_the_same(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    with LLM.around(start_engine(config_for("LLM", str(folder), SETTINGS), in_process=True)) as llm:
        assert checksums(llm) == of_file(folder)


@pytest.mark.parametrize("form", ["W4A16", "FP8_DYNAMIC"])
def test_codes_have_checksums_of_their_own_and_stay_in_place(form: str, tmp_path: Path) -> None:
    written = quantized_files.FORMS[form]
    quantized_files.save_form(tmp_path / "ours", written, CODED)
    rolled = replace(written, write=lambda weight: written.write(weight.roll(1, 0)))
    quantized_files.save_form(tmp_path / "theirs", rolled, CODED)
    settings: dict[str, Any] = SETTINGS | {"keep_quantized": True}
    with LLM(str(tmp_path / "theirs"), **settings) as llm:
        theirs = llm.weights_checksum()
    with LLM(str(tmp_path / "ours"), **settings) as llm:
        tokens = generated(llm)
        found = llm.weights_checksum()
        assert found.coded and all("norm" not in name for name in found.coded)
        assert generated(llm) == tokens and llm.weights_checksum() == found != theirs
        llm.update_weights(tmp_path / "theirs")
        assert llm.weights_checksum() == theirs
