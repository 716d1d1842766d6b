"""Weights replaced under a running engine: tokens and drafts are those of an engine that was started with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM
from outrider.formats import WeightSlot
from outrider.formats.gguf import GgufLinear
from outrider.kernels import cpu as native
from outrider.layers import Linear, find_modules
from outrider.models.sources.model_source import WeightError
from outrider.runner.commands import WeightsIncomplete
from outrider.runner.storages import find_storages
from tests.drafters.checkpoints import make_drafter
from tests.engine.harness import CONFIGS, greedy, prompt_of, save_folder, tokens_of, with_other_weights
from tests.engine.test_sleep import let_memory_move
from tests.models import gemma4, quantized_files
from tests.models.oracle import make_folder
from tests.models.test_hybrid_mtp import CASES, make_checkpoint
from tests.unit.test_sources import write_gguf

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 3,
                            "num_pages": 64}
PROMPTS = [prompt_of(3, 20), prompt_of(4, 8) * 4]
CODED, CODED_MOE = (config | {"vocab_size": 256} for config in (quantized_files.CONFIG, quantized_files.MOE))
NAME = "model.layers.1.mlp.down_proj.weight"


def speculative(method: str, folder: Path | None = None) -> dict[str, Any]:
    more = {"prompt_lookup_min": 1} if method == "ngram" else {} if folder is None else {"model": str(folder)}
    return {"method": method, "num_speculative_tokens": 2, "auto": False, **more}


def llama(path: Path, **changes: Any) -> Path:
    return save_folder(path / "target", CONFIGS["llama"] | changes, seed=3)


def with_eagle(kind: str) -> Callable[[Path], tuple[Path, Any]]:
    return lambda path: (llama(path), make_drafter(kind, "llama", path / kind).speculative(2))


def with_assistant(path: Path) -> tuple[Path, Any]:
    name = next(iter(gemma4.TARGETS))
    assistant = gemma4.save_assistant(name, path / "assistant")
    return gemma4.save_target(name, path / "target"), speculative("mtp", assistant)


def mtp(family: str) -> Callable[[Path], tuple[Path, Any]]:
    return lambda path: (make_checkpoint(family, CASES[family], path / family), speculative("mtp"))


FOLDERS: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "llama, ngram": lambda path: (llama(path), speculative("ngram")),
    "tied head": lambda path: (llama(path, tie_word_embeddings=True), None),
    "eagle": with_eagle("eagle"),
    "eagle3": with_eagle("eagle3"),
    "draft model": lambda path: (llama(path), make_drafter("draft_model", "llama", path / "draft").speculative(2)),
    "norms with an offset": lambda path: (save_folder(path / "gemma3", CONFIGS["gemma3"], seed=3), None),
    "experts": lambda path: (make_folder("qwen3_moe", path / "moe"), None),
    "states, mtp": mtp("nemotron_h"),
    "delta rule, experts in one tensor, mtp": mtp("qwen3_5_moe"),
    "assistant": with_assistant,
    "latents, indexer": lambda path: (make_folder("deepseek_v32", path / "latent"), None),
}


def generated(llm: LLM) -> tuple[list[list[list[int]]], int]:
    """(tokens, accepted drafts)"""
    before = llm.engine.stats.num_accepted_tokens
    tokens = tokens_of(llm.generate([list(p) for p in PROMPTS], greedy(12, ignore_eos=True)))
    return tokens, llm.engine.stats.num_accepted_tokens - before


LONG = {"eagle", "draft model", "delta rule, experts in one tensor, mtp", "assistant", "latents, indexer"}


@pytest.mark.parametrize(("case", "moves"), [
    pytest.param(case, moves, marks=[pytest.mark.long] if moves or case in LONG else [],
                 id=case + (", memory comes back elsewhere" if moves else ""))
    for case in FOLDERS for moves in (False, True)
])
def test_tokens_and_drafts_are_those_of_an_engine_started_with_the_weights(
    case: str, moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, drafts = FOLDERS[case](tmp_path)
    other = with_other_weights(folder, tmp_path / "other")
    settings = SETTINGS | {"speculative_config": drafts}
    if moves:
        let_memory_move(monkeypatch)
        settings["dtype"] = "float64"
    with LLM(str(other), **settings) as llm:
        theirs = generated(llm)
    with LLM(str(folder), **settings) as llm:
        ours = generated(llm)
        assert ours[0] != theirs[0]
        tensors = load_file(other / "model.safetensors")
        assert llm.update_weights(iter(tensors.items())).num_tensors > 10
        assert generated(llm) == theirs, "the prompts were computed before: their pages hold the old weights' values"
        llm.update_weights(folder)
        assert generated(llm) == ours
        llm.sleep(level=2)
        llm.wake_up()
        assert generated(llm) == ours, "weights were dropped and read again"
        llm.sleep(level=2)
        llm.update_weights(other / "model.safetensors")
        llm.wake_up()
        assert generated(llm) == theirs, "weights were dropped and given"


def test_some_weights_can_be_replaced_alone_in_any_type(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    changed = (tensors[NAME] * 1.5).bfloat16()
    other = shutil.copytree(folder, tmp_path / "other")
    save_file(tensors | {NAME: changed.float()}, other / "model.safetensors")
    with LLM(str(other), **SETTINGS) as llm:
        theirs = generated(llm)
    with LLM(str(folder), **SETTINGS) as llm:
        ours = generated(llm)
        assert ours != theirs
        assert llm.update_weights({NAME: changed}).num_tensors == 1 and generated(llm) == theirs
        old = tensors[NAME].numpy()
        old.flags.writeable = False
        assert llm.update_weights([(NAME, old)]).num_tensors == 1 and generated(llm) == ours
        llm.update_weights([(NAME, changed.double().numpy().T.copy().T)])
        assert generated(llm) == theirs


def bad(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[Any, str]]:
    tensor = tensors[NAME]
    broken = tensor.clone()
    broken[3, 4] = float("nan")
    return {
        "a name that is unknown": ([(NAME, tensor), ("model.extra", tensor)], "no weights of these names: model.extra"),
        "a shape": ([(NAME, tensor[1:])], r"has shape \[31, 64\], and the model needs \[32, 64\]"),
        "a number": ([("model.norm.weight", tensors["model.norm.weight"] + 1), (NAME, broken)], "holds NaN or Inf"),
        "integers": ([(NAME, tensor.int())], "needs a float type"),
        "twice": ([(NAME, tensor), (NAME, tensor)], "down_proj.weight twice"),
        "a type": ([(NAME, np.zeros(tuple(tensor.shape), dtype="S4"))], "which torch cannot hold"),
        "nothing": ([], "no tensor that the model uses"),
        "no tensor": ([(NAME, [1.0])], "must be a tensor of torch or an array of numpy"),
        "no pair": ([NAME], "must be pairs of a name and a tensor"),
        "a number alone": (3, "give a path or pairs"),
        "no path": ("no/such/folder", "no/such/folder does not exist"),
    }


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    with LLM(str(folder), **SETTINGS) as llm:
        ours, stream = generated(llm), llm.stream(list(PROMPTS[0]), greedy(12, ignore_eos=True))
        next(stream)
        worker: Any = llm.engine.runner
        before = {name: slot.target.clone() for name, slot in worker.device_step.model.weights().items()}
        for why, (weights, message) in bad(tensors).items():
            with pytest.raises(ValueError, match=message):
                llm.update_weights(weights)
            slots = worker.device_step.model.weights()
            assert all(torch.equal(slots[name].target, before[name]) for name in before), why
        *_, last = stream
        assert last.outputs[0].token_ids == ours[0][0][0] and generated(llm) == ours
        assert issubclass(WeightError, ValueError)


def test_an_update_that_fails_half_way_serves_nothing_until_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = llama(tmp_path)
    other = with_other_weights(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    with LLM(str(other), **SETTINGS) as llm:
        theirs = generated(llm)
    with LLM(str(folder), **SETTINGS) as llm:
        ours, stream, store = generated(llm), llm.stream(list(PROMPTS[0]), greedy(4)), WeightSlot.store
        next(stream)
        num_stored = 0

        def fail_at_third(slot: WeightSlot, tensor: torch.Tensor) -> None:
            nonlocal num_stored
            num_stored += 1
            if num_stored == 3:
                raise RuntimeError("the device has lost its mind")
            store(slot, tensor)

        with monkeypatch.context() as patched:
            patched.setattr(WeightSlot, "store", fail_at_third)
            with pytest.raises(WeightsIncomplete, match="failed after some were changed.*lost its mind"):
                llm.update_weights(tensors)
        assert not llm.is_sleeping() and llm.engine.num_requests and not llm.engine._submit()
        assert "until an update with all weights succeeds" in llm.engine.pause.reason
        with pytest.raises(WeightError, match="this update lacks lm_head.weight, "):
            llm.update_weights({NAME: tensors[NAME]})
        assert llm.engine.pause.is_on
        llm.update_weights(tensors)
        *_, last = stream
        assert last.finished and generated(llm) == theirs
        with monkeypatch.context() as patched:
            patched.setattr(WeightSlot, "store", fail_at_third)
            num_stored = 0
            with pytest.raises(WeightsIncomplete):
                llm.update_weights(tensors)
        llm.sleep(level=2)
        llm.wake_up()
        assert generated(llm) == ours, "or until the weights are read anew"


@pytest.mark.parametrize(("moves", "level"), [(False, 1), (False, 2), (True, 2)])
def test_an_update_that_fails_half_way_leaves_weights_asleep_that_slept(
    moves: bool, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = llama(tmp_path)
    tensors = load_file(with_other_weights(folder, tmp_path / "other") / "model.safetensors")
    settings = SETTINGS | {"dtype": "float64"} if moves else SETTINGS
    if moves:
        let_memory_move(monkeypatch)

    def fail_at_last(slot: WeightSlot, tensor: torch.Tensor) -> None:
        store(slot, tensor)
        names.pop()
        if not names:
            raise RuntimeError("the device has lost its mind")

    with LLM(str(folder), **settings) as llm:
        ours, store = generated(llm), WeightSlot.store
        for is_asleep in (True, False):
            if is_asleep:
                llm.sleep(level)
            with monkeypatch.context() as patched:
                patched.setattr(WeightSlot, "store", fail_at_last)
                names = list(tensors)
                with pytest.raises(WeightsIncomplete):
                    llm.update_weights(tensors)
            if not is_asleep:
                llm.sleep(level)
            with pytest.raises(WeightError, match="this update lacks"):
                llm.update_weights({NAME: tensors[NAME]})
            llm.wake_up(["kv_cache"])
            assert llm.is_sleeping() and llm.engine.pause.is_on
            llm.wake_up()
            assert not llm.engine.pause.is_on and generated(llm) == ours, "the files were read again"


def test_a_running_request_goes_on_with_the_new_weights_from_its_tokens(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    other = with_other_weights(folder, tmp_path / "other")
    with LLM(str(folder), **SETTINGS) as llm:
        stream = llm.stream(list(PROMPTS[0]), greedy(12, ignore_eos=True))
        while len(next(stream).outputs[0].token_ids) < 4:
            continue
        llm.update_weights(other)
        told = list(llm.engine._held)  # what the steps in flight had added when the update came
        *_, last = stream
        tokens = list(last.outputs[0].token_ids)
        assert last.metrics.num_preemptions == 1 and len(tokens) == 12
        first = 4 + sum(len(increment.token_ids) for increment in told)
        assert llm.generate([PROMPTS[0] + tokens[:first]], greedy(12 - first, ignore_eos=True))[0].outputs[
            0].token_ids == tokens[first:]


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_weights_that_are_coded_at_load_are_coded_again(quantization: str, tmp_path: Path) -> None:
    folder = llama(tmp_path, intermediate_size=128)
    other = with_other_weights(folder, tmp_path / "other")
    settings = SETTINGS | {"quantization": quantization}
    with LLM(str(other), **settings) as llm:
        theirs = generated(llm)
    with LLM(str(folder), **settings) as llm:
        ours, weight = generated(llm), load_file(other / "model.safetensors")[NAME]
        assert ours != theirs
        llm.update_weights(other)
        assert generated(llm) == theirs
        for bad, why in ((weight[:, :100], r"has shape \[32, 100\], and the model needs \[32, 128\]"),
                         (weight[0], r"has shape \[128\]"), (weight[:0], r"has shape \[0, 128\]"),
                         (weight.int(), ".*needs a float type"), (weight / 0, "holds NaN or Inf")):
            with pytest.raises(WeightError, match=f"{NAME} {why}"):
                llm.update_weights({NAME: bad})
        assert generated(llm) == theirs
        llm.sleep(level=2)
        llm.update_weights(folder)
        llm.wake_up()
        assert generated(llm) == ours


@pytest.mark.parametrize(("form", "keep_quantized"), [("NVFP4", True), ("GPTQ", False),
                                                      pytest.param("GPTQ", True, marks=pytest.mark.long)])
def test_a_folder_of_the_same_form_replaces_weights_in_codes(form: str, keep_quantized: bool, tmp_path: Path) -> None:
    written = quantized_files.FORMS[form]
    quantized_files.save_form(tmp_path / "ours", written, CODED_MOE)
    rolled = replace(written, write=lambda weight: written.write(weight.roll(1, 0)))
    quantized_files.save_form(tmp_path / "theirs", rolled, CODED_MOE)
    settings = SETTINGS | {"keep_quantized": keep_quantized}
    with LLM(str(tmp_path / "theirs"), **settings) as llm:
        theirs = generated(llm)
    with LLM(str(tmp_path / "ours"), **settings) as llm:
        ours = generated(llm)
        assert ours != theirs
        llm.update_weights(tmp_path / "theirs")
        assert generated(llm) == theirs
        llm.sleep(level=2)
        llm.update_weights(tmp_path / "ours" / "model.safetensors")
        llm.wake_up()
        assert generated(llm) == ours


def test_a_folder_of_another_form_is_refused_or_becomes_the_codes_of_the_engine(tmp_path: Path) -> None:
    numbers = quantized_files.save_form(tmp_path / "fp8", quantized_files.FORMS["FP8_DYNAMIC"], CODED)
    quantized_files.save_form(tmp_path / "int4", quantized_files.FORMS["W4A16"], CODED)
    quantized_files.save_folder(tmp_path / "numbers", numbers, CODED)
    with LLM(str(tmp_path / "int4"), **SETTINGS) as llm:
        ours = generated(llm)
        with pytest.raises(WeightError, match="is kept quantised, .* .int4.*the model's quantization_config"):
            llm.update_weights(tmp_path / "fp8")
        assert generated(llm) == ours
    settings = SETTINGS | {"quantization": "int4"}
    with LLM(str(tmp_path / "numbers"), **settings) as llm:
        coded = generated(llm)
        llm.update_weights({name: tensor / 2 for name, tensor in numbers.items()})
        llm.update_weights(tmp_path / "fp8")
        assert generated(llm) == coded


def test_weights_in_the_bits_of_their_file_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip(native.reason())
    monkeypatch.setattr("outrider.formats.gguf.kept_bits_are_fast", lambda: True)
    path = tmp_path / "model.gguf"
    write_gguf(path, "Q8_0")
    prompts = [[3, 4, 5, 6, 7] * 4]
    with LLM(str(path), **SETTINGS) as llm:
        ours = tokens_of(llm.generate(prompts, greedy(8)))
        name = "model.layers.0.mlp.up_proj.weight"
        with pytest.raises(ValueError, match=f"{name} .* is kept quantised, .* .Q8_0.: .*keep_quantized=False"):
            llm.update_weights({name: torch.ones(96, 64)})
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert tokens_of(llm.generate(prompts, greedy(8))) == ours
        llm.update_weights({"model.norm.weight": torch.zeros(256)})
        assert tokens_of(llm.generate(prompts, greedy(8))) != ours, "other weights can be replaced"
        llm.update_weights(path)
        assert tokens_of(llm.generate(prompts, greedy(8))) == ours, "a file of the same kinds has all weights"
        write_gguf(tmp_path / "other.gguf", "Q4_0")
        with pytest.raises(ValueError, match="is kept quantised, .* .Q8_0.: .*a GGUF file of the same kinds"):
            llm.update_weights(tmp_path / "other.gguf")


def test_copies_of_weights_in_the_bits_of_their_file_are_counted_once(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """On some machines products hold interleaved copies, which no setting drops as it drops packed ones."""
    if not native.available():
        pytest.skip(native.reason())
    monkeypatch.setattr("outrider.formats.gguf.kept_bits_are_fast", lambda: True)
    monkeypatch.setattr(GgufLinear, "prepare", lambda linear, allow_copy: 1000)
    write_gguf(tmp_path / "model.gguf", "Q8_0")
    with LLM(str(tmp_path / "model.gguf"), **SETTINGS, activation_bits=8) as llm:
        prompts, worker = [[3, 4, 5, 6, 7] * 4], cast(Any, llm.engine.runner)
        ours, model = tokens_of(llm.generate(prompts, greedy(8))), worker.device_step.model
        slots = [slot.target for slot in model.weights().values()]
        formats = [linear.format for linear in find_modules([model], Linear)]
        held = find_storages([slots, formats, worker.device_step.pool.data])
        num_bytes = sum(storage.nbytes() for storage in held.values())
        del held, slots, formats
        assert llm.sleep(level=2).total_bytes == num_bytes
        llm.wake_up()
        assert tokens_of(llm.generate(prompts, greedy(8))) == ours
