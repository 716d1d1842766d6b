"""Weights that come one by one: each is copied when it comes, and no token comes from a mixture of two updates."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM
from outrider.compat.engine_args import config_for
from outrider.core.background_work import BackgroundWork
from outrider.engine.start import start_engine
from outrider.models.sources.model_source import WeightError
from outrider.runner.commands import WeightsIncomplete
from outrider.runner.storages import FreedMemory, find_storages
from outrider.runner.weight_update import is_buffer
from tests.engine.harness import greedy, with_other_weights
from tests.engine.test_sleep import _no_memory, let_memory_move
from tests.engine.test_update_weights import FOLDERS, LONG, NAME, PROMPTS, SETTINGS, generated, llama
from tests.models.oracle import make_folder

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    folder = llama(tmp_path)
    return folder, with_other_weights(folder, tmp_path / "other")


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def answers(folder: Path, **settings: Any) -> Any:
    with LLM(str(folder), **SETTINGS | settings) as llm:
        return generated(llm)


def stream(llm: LLM, tensors: Tensors) -> None:
    """As a trainer does it that shares the engine's process."""
    for name, tensor in tensors.items():
        llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(name, tensor)])


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] if case in LONG else [])
                                  for case in FOLDERS])
def test_tokens_and_drafts_are_those_of_an_engine_started_with_the_weights(case: str, tmp_path: Path) -> None:
    folder, drafts = FOLDERS[case](tmp_path)
    other = with_other_weights(folder, tmp_path / "other")
    theirs = answers(other, speculative_config=drafts)
    with LLM(str(folder), **SETTINGS | {"speculative_config": drafts}) as llm:
        ours = generated(llm)
        stream(llm, tensors_of(other))
        llm.reset_prefix_cache()
        assert generated(llm) == theirs != ours
        stream(llm, tensors_of(folder))
        assert generated(llm) == ours, "a request ends the update, too"
        (folder / "model.safetensors").rename(folder / "elsewhere")
        for _ in range(2):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            stream(llm, tensors_of(other))
            llm.reset_prefix_cache()
            llm.wake_up(tags=["kv_cache"])
            assert generated(llm)[0] == theirs[0], "no file was read but a drafter's own"
        llm.sleep(level=2)
        stream(llm, tensors_of(other))
        llm.wake_up()
        assert generated(llm)[0] == theirs[0], "weights came while the engine slept"


def test_buffers_that_trainers_do_not_have_are_kept(tmp_path: Path) -> None:
    folder = make_folder("glm4_moe", tmp_path / "model")
    tensors = tensors_of(folder)
    parameters = {name: tensor for name, tensor in tensors.items() if not is_buffer(name)}
    (buffer, *_) = tensors.keys() - parameters.keys()
    with LLM(str(folder), **SETTINGS) as llm:
        ours = generated(llm)
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.load_weights(parameters)
        llm.wake_up(tags=["kv_cache"])
        assert generated(llm) == ours
        llm.load_weights({buffer: tensors[buffer] + 1})
        with pytest.raises(WeightsIncomplete):
            llm.load_weights([("model.extra", torch.ones(1))])
        llm.load_weights(parameters)
        with pytest.raises(WeightsIncomplete, match="the update lacks " + buffer):
            generated(llm)  # the failed update has replaced one
        llm.load_weights(tensors)
        assert generated(llm) == ours


def test_some_weights_of_a_model_that_is_whole_in_any_type(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = tensors_of(folders[0])
    changed = (tensors[NAME] * 1.5).bfloat16()
    other = shutil.copytree(folders[0], tmp_path / "changed")
    save_file(tensors | {NAME: changed.float()}, other / "model.safetensors")
    theirs = answers(other)
    with LLM(str(folders[0]), **SETTINGS) as llm:
        ours = generated(llm)
        for given, expected in [(changed, theirs), (tensors[NAME].double(), ours), (changed.float().numpy(), theirs),
                                (np.asfortranarray(tensors[NAME].numpy()), ours)]:
            llm.load_weights([(NAME, given)])
            assert generated(llm) == expected


def test_a_tensor_is_copied_when_it_comes(folders: tuple[Path, Path]) -> None:
    tensors = tensors_of(folders[1])

    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            buffer = tensor.clone()
            yield name, buffer
            buffer.fill_(torch.nan)

    theirs = answers(folders[1])
    with LLM(str(folders[0]), **SETTINGS) as llm:
        llm.load_weights(reused())
        assert generated(llm) == theirs


def test_a_worker_in_a_process_gets_weights(folders: tuple[Path, Path]) -> None:
    theirs = answers(folders[1])
    config = config_for("LLM", str(folders[0]), SETTINGS)
    with LLM.around(start_engine(config, in_process=True)) as llm:
        llm.load_weights(tensors_of(folders[1]))
        assert generated(llm) == theirs
        with pytest.raises(WeightError, match="no weight of this name: model.extra"):
            llm.load_weights([("model.extra", torch.ones(2))])
        assert generated(llm) == theirs


def bad(tensors: Tensors) -> dict[str, tuple[Any, str]]:
    broken = tensors[NAME].clone()
    broken[3, 4] = torch.nan
    return {
        "name": (("model.extra", tensors[NAME]), "no weight of this name: model.extra"),
        "shape": ((NAME, tensors[NAME][1:]), r"has shape \[31, 64\], and the model needs \[32, 64\]"),
        "number": ((NAME, broken), "holds NaN or Inf"),
        "integers": ((NAME, tensors[NAME].int()), "needs a float type"),
        "twice": (("model.norm.weight", tensors["model.norm.weight"]), "model.norm.weight came twice in one update"),
    }


def test_a_first_tensor_that_does_not_fit_changes_nothing(folders: tuple[Path, Path]) -> None:
    tensors = tensors_of(folders[0])
    with LLM(str(folders[0]), **SETTINGS) as llm:
        ours = generated(llm)
        for why, (pair, message) in bad(tensors).items():
            if why != "twice":
                with pytest.raises(WeightError, match=message):
                    llm.load_weights([pair])
                assert generated(llm) == ours
        for weights, message in [([NAME], "must be pairs"), (3, "give pairs"), ("folder", "give pairs"),
                                 ([(NAME, [1.0])], "must be a tensor")]:
            with pytest.raises(ValueError, match=message):
                llm.load_weights(weights)  # type: ignore[arg-type]
        assert generated(llm) == ours


@pytest.mark.parametrize("why", ["name", "shape", "number", "integers", "twice"])
def test_a_later_one_that_does_not_fit_serves_nothing_until_a_whole_update(folders: tuple[Path, Path],
                                                                           why: str) -> None:
    folder, other = folders
    theirs, tensors = answers(other), tensors_of(other)
    pair, message = bad(tensors)[why]
    with LLM(str(folder), **SETTINGS) as llm:
        running = llm.stream(list(PROMPTS[0]), greedy(4))
        next(running)
        llm.load_weights({"model.norm.weight": tensors["model.norm.weight"]})
        with pytest.raises(WeightsIncomplete, match="ended after 1 tensors.*" + message):
            llm.load_weights([pair])
        for _ in range(2):
            with pytest.raises(WeightsIncomplete, match="until an update with all weights"):
                llm.generate([list(PROMPTS[0])], greedy(4))
        assert llm.engine.num_requests and not llm.engine._submit(), "the one that ran waits"
        llm.load_weights({NAME: tensors[NAME]})
        with pytest.raises(WeightsIncomplete, match="the update lacks lm_head.weight, model.embed_tokens.weight"):
            llm.reset_prefix_cache()
        with pytest.raises(WeightsIncomplete, match="the update lacks"):
            generated(llm)
        llm.load_weights(tensors)
        assert "reset_prefix_cache() ends it" in llm.engine.pause.reason
        llm.reset_prefix_cache()
        *_, last = running
        assert last.finished and generated(llm) == theirs


def test_an_update_with_a_start_needs_all_weights_and_its_end(folders: tuple[Path, Path]) -> None:
    folder, other = folders
    theirs, tensors = answers(other), tensors_of(other)
    with LLM(str(folder), **SETTINGS) as llm:
        ours = generated(llm)
        with pytest.raises(ValueError, match="start_weight_update"):
            llm.finish_weight_update()
        llm.start_weight_update()
        with pytest.raises(ValueError, match="is in progress: end it"):
            llm.start_weight_update()
        with pytest.raises(ValueError, match="give its weights to load_weights"):
            llm.update_weights(tensors)
        with pytest.raises(WeightsIncomplete, match=r"is in progress: finish_weight_update\(\) ends it"):
            generated(llm)
        with pytest.raises(WeightError, match="no tensor that the model uses"):
            llm.finish_weight_update()
        assert generated(llm) == ours, "nothing came"
        llm.start_weight_update()
        llm.load_weights({NAME: tensors[NAME]})
        llm.reset_prefix_cache()  # which ends no update that was started by name
        with pytest.raises(WeightsIncomplete, match="the update lacks lm_head.weight"):
            llm.finish_weight_update()
        with pytest.raises(WeightsIncomplete, match="the update lacks lm_head.weight"):
            generated(llm)
        llm.start_weight_update()
        llm.load_weights(tensors)
        assert llm.finish_weight_update().num_tensors == len(tensors)
        assert generated(llm) == theirs


@pytest.mark.parametrize("why", ["name", "shape", "number", "integers"])
def test_an_update_of_which_a_weight_was_refused_publishes_nothing(folders: tuple[Path, Path], why: str) -> None:
    folder, other = folders
    theirs, tensors = answers(other), tensors_of(other)
    pair, message = bad(tensors)[why]
    with LLM(str(folder), **SETTINGS) as llm:
        ours = generated(llm)
        llm.start_weight_update()
        with pytest.raises(WeightError, match=message):
            llm.load_weights([pair])
        for more in (lambda: llm.load_weights({NAME: tensors[NAME]}), lambda: llm.update_weights({NAME: tensors[NAME]}),
                     lambda: llm.update_weights(tensors)):
            with pytest.raises(ValueError, match=r"was refused .*: start_weight_update\(\) begins it again"):
                more()
            assert generated(llm) == ours and llm.weights_version == 0
        with pytest.raises(ValueError, match="without changing what is served: a weight of this update was refused"):
            llm.finish_weight_update()
        llm.update_weights(folder)
        for num in (0, 2):  # weights that come before the one that is refused
            llm.start_weight_update()
            with pytest.raises((WeightError, WeightsIncomplete)):
                llm.load_weights([*list(tensors.items())[:num], pair])
            llm.start_weight_update()
            llm.load_weights(tensors)
            llm.finish_weight_update()
            assert generated(llm) == theirs


def test_weights_of_an_update_that_sleep_has_ended_are_not_published_alone(folders: tuple[Path, Path]) -> None:
    folder, other = folders
    tensors = tensors_of(other)
    with LLM(str(folder), **SETTINGS) as llm:
        ours = generated(llm)
        llm.start_weight_update()
        llm.sleep(level=1)
        llm.wake_up()
        with pytest.raises(ValueError, match=r"went to sleep: start_weight_update\(\) begins it again"):
            llm.load_weights({NAME: tensors[NAME]})
        assert generated(llm) == ours and llm.weights_version == 0


def test_a_weight_belongs_to_the_update_in_which_its_call_began(folders: tuple[Path, Path]) -> None:
    folder, other = folders
    theirs, tensors = answers(other), tensors_of(other)
    with LLM(str(folder), **SETTINGS) as llm:
        def late() -> Iterator[tuple[str, torch.Tensor]]:
            yield NAME, tensors_of(folder)[NAME]
            with pytest.raises(WeightsIncomplete, match="a call of load_weights goes on"):
                llm.finish_weight_update()
            with pytest.raises(WeightsIncomplete):
                llm.load_weights([("model.extra", tensors[NAME])])
            llm.start_weight_update()
            yield "model.norm.weight", tensors_of(folder)["model.norm.weight"]

        llm.start_weight_update()
        with pytest.raises(ValueError, match="the weight arrived after its update had ended"):
            llm.load_weights(late())
        llm.load_weights(tensors)
        llm.finish_weight_update()
        assert generated(llm) == theirs


def test_a_whole_update_at_once_mends_one_that_was_cut_off(folders: tuple[Path, Path]) -> None:
    folder, other = folders
    theirs, tensors = answers(other), tensors_of(other)
    with LLM(str(folder), **SETTINGS) as llm:
        ours = generated(llm)
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.load_weights({NAME: tensors[NAME]})
        with pytest.raises(WeightsIncomplete, match="the update lacks"):
            llm.wake_up(tags=["kv_cache"])
        llm.wake_up(tags=["kv_cache"])
        with pytest.raises(WeightsIncomplete, match="the update lacks"):
            generated(llm)  # the files are not read: they are older than what the trainer has
        with pytest.raises(WeightError, match="this update lacks"):
            llm.update_weights({NAME: tensors[NAME]})
        llm.update_weights(tensors)
        assert generated(llm) == theirs
        llm.start_weight_update()
        llm.load_weights({NAME: tensors[NAME]})
        llm.sleep(level=1)
        with pytest.raises(WeightsIncomplete, match="when the engine went to sleep"):
            generated(llm)
        llm.wake_up()
        assert generated(llm) == ours, "or they are read from the files"


def test_dropped_weights_are_read_with_the_cache_if_none_follow(folders: tuple[Path, Path]) -> None:
    tensors = tensors_of(folders[1])
    with LLM(str(folders[0]), **SETTINGS) as llm:
        ours = generated(llm)
        for tags in (["weights"], ["kv_cache"]), (["kv_cache"], ["weights"]):
            llm.sleep(level=2)
            reports = [llm.wake_up(tags=own) for own in tags]
            assert [own.were_weights_read for own in reports] == [False, True] and generated(llm) == ours
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.update_weights({NAME: tensors[NAME]})
        llm.wake_up()
        assert generated(llm) != ours, "one weight alone, over those of the files"


def test_every_token_names_the_version_of_the_weights_that_it_came_from(folders: tuple[Path, Path]) -> None:
    folder, other = folders
    asked = greedy(12, ignore_eos=True)
    with LLM(str(folder), **SETTINGS) as llm:
        (first,) = llm.generate([list(PROMPTS[0])], asked)
        assert llm.weights_version == 0 and first.outputs[0].weight_versions == [(0, 0, 12)]
        running = llm.stream(list(PROMPTS[0]), asked)
        while len(next(running).outputs[0].token_ids) < 4:
            continue
        stream(llm, tensors_of(other))
        assert llm.weights_version == 0, "it is not whole before its end"
        llm.reset_prefix_cache()
        assert llm.weights_version == 1
        llm.update_weights(folder)
        *_, last = running
        (old, new) = last.outputs[0].weight_versions
        assert (old.version, new.version) == (0, 2) and 4 <= old.end == new.start < new.end == 12
        assert last.outputs[0].token_ids == first.outputs[0].token_ids, "the weights are the first ones again"
        with pytest.raises(WeightError):
            llm.update_weights({NAME: torch.ones(1)})
        (again,) = llm.generate([list(PROMPTS[0])], asked)
        assert again.outputs[0].weight_versions == [(2, 0, 12)] and llm.weights_version == 2
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.weights_version == 3, "those of the files may be others than the last that came"


def test_no_page_of_older_weights_is_found_even_if_none_is_forgotten(folders: tuple[Path, Path],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = answers(folders[1])
    with LLM(str(folders[0]), **SETTINGS) as llm:
        generated(llm)
        with monkeypatch.context() as patched:
            patched.setattr(type(llm.engine.scheduler.cache), "forget_all", lambda cache: None)
            llm.load_weights(tensors_of(folders[1]))
        before = llm.engine.scheduler.cache.stats.hit_tokens
        assert generated(llm) == theirs and llm.engine.scheduler.cache.stats.hit_tokens == before
        generated(llm)
        assert llm.engine.scheduler.cache.stats.hit_tokens > before


class Capturing:
    """A runner of which only the captured steps are known: how many were made, and with which weights."""

    def __init__(self, llm: LLM) -> None:
        self.worker: Any = llm.engine.runner
        self.graphs, self.captured, self.fails = self, [], False
        self.worker.residence._runner = self

    def drop(self) -> None:
        self.captured = []

    def capture_again(self) -> int:
        if self.fails:
            raise RuntimeError("no capture today")
        assert self.worker.residence.can_run
        self.captured.append({name: slot.target.clone() for name, slot in
                              self.worker.device_step.model.weights().items()})
        return len(self.captured)


def test_steps_are_captured_when_an_update_is_whole(folders: tuple[Path, Path],
                                                    caplog: pytest.LogCaptureFixture) -> None:
    folder, other = folders
    theirs, tensors = answers(other), tensors_of(other)
    with LLM(str(folder), **SETTINGS) as llm:
        runner = Capturing(llm)
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        llm.start_weight_update()
        llm.load_weights({NAME: tensors.pop(NAME)})
        assert llm.wake_up(["kv_cache"]).num_captured == 0 and not runner.captured
        assert runner.worker.idle(1.0) is None, "nothing is captured ahead with half an update"
        llm.load_weights(tensors)
        assert llm.finish_weight_update().num_captured == 1
        (held,) = runner.captured
        assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
        assert generated(llm) == theirs
        runner.fails = True
        llm.update_weights(folder)
        assert llm.weights_version == 2, "the weights are new and whole"
        assert "could not be captured again" in caplog.text
        assert generated(llm) == answers(folder)


def test_requests_wait_for_the_end_of_an_update_whatever_wakes_up(folders: tuple[Path, Path]) -> None:
    folder, other = folders
    theirs, tensors = answers(other), tensors_of(other)
    with LLM(str(folder), **SETTINGS) as llm:
        llm.sleep(level=1)
        llm.start_weight_update()
        llm.wake_up()
        with pytest.raises(WeightsIncomplete, match="finish_weight_update"):
            generated(llm)
        llm.load_weights(tensors)
        llm.finish_weight_update()
        assert generated(llm) == theirs


@pytest.mark.parametrize("level", [1, 2])
def test_tensors_that_the_model_ignores_change_nothing(tmp_path: Path, level: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    let_memory_move(monkeypatch)
    folder = llama(tmp_path, tie_word_embeddings=True)
    ignored = {"lm_head.weight": tensors_of(folder)["model.embed_tokens.weight"]}
    with LLM(str(folder), **SETTINGS | {"dtype": "float64"}) as llm:
        ours = generated(llm)
        llm.load_weights(ignored)
        assert generated(llm) == ours and llm.weights_version == 0
        llm.sleep(level)
        llm.load_weights(ignored)
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert generated(llm) == ours


@pytest.mark.parametrize("level", [1, 2])
def test_weights_come_while_memory_sleeps_that_moves(folders: tuple[Path, Path], level: int,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    let_memory_move(monkeypatch)
    theirs, tensors = answers(folders[1], dtype="float64"), tensors_of(folders[1])
    with LLM(str(folders[0]), **SETTINGS | {"dtype": "float64"}) as llm:
        llm.sleep(level)
        with pytest.raises(WeightError, match="no weight of this name"):
            llm.load_weights([("model.extra", torch.ones(2))])
        llm.load_weights(tensors)
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert generated(llm) == theirs


def test_a_call_that_goes_on_is_ended_by_nobody_else(folders: tuple[Path, Path]) -> None:
    folder, other = folders
    theirs, tensors = answers(other), tensors_of(other)
    first, rest = dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:])
    with LLM(str(folder), **SETTINGS) as llm, ThreadPoolExecutor(1) as thread:
        ours = generated(llm)

        def between() -> Iterator[tuple[str, torch.Tensor]]:
            yield from first.items()
            for use in (lambda: generated(llm), llm.reset_prefix_cache, llm.sleep, lambda: llm.update_weights(tensors)):
                with pytest.raises(WeightsIncomplete, match="a call of load_weights goes on"):
                    thread.submit(use).result()
            yield from rest.items()

        llm.load_weights(between())
        assert llm.weights_version == 0 and generated(llm) == theirs != ours

        def cut_off() -> Iterator[tuple[str, torch.Tensor]]:
            yield NAME, tensors_of(folder)[NAME]
            raise OSError("the trainer is gone")

        with pytest.raises(OSError, match="the trainer is gone"):
            llm.load_weights(cut_off())
        with pytest.raises(WeightsIncomplete, match="the update lacks lm_head.weight"):
            generated(llm)
        llm.load_weights(tensors)
        assert generated(llm) == theirs


def test_background_work_forgets_a_model_whose_weights_come_from_files_again(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(folders[0]), **SETTINGS) as llm:
        worker, forgotten = cast(Any, llm.engine.runner), []
        worker.residence._parts = replace(worker.residence._parts, background=BackgroundWork())
        monkeypatch.setattr(BackgroundWork, "forget_model", lambda work: forgotten.append(work))

        def sleep_and_wake() -> int:
            llm.sleep(level=2)
            llm.wake_up()
            return len(forgotten)

        assert sleep_and_wake() == 0, "the model is the same"
        llm.load_weights(tensors_of(folders[1]))
        llm.reset_prefix_cache()
        assert len(forgotten) == 1
        assert sleep_and_wake() == 2 and sleep_and_wake() == 2


def test_a_buffer_of_an_update_that_sleep_ended_has_to_come_again(tmp_path: Path) -> None:
    folder = make_folder("glm4_moe", tmp_path / "model")
    tensors = tensors_of(folder)
    (buffer, *_) = filter(is_buffer, tensors)
    with LLM(str(folder), **SETTINGS) as llm:
        ours = generated(llm)
        llm.start_weight_update()
        llm.load_weights({buffer: tensors[buffer] + 1})
        llm.sleep(level=1)
        with pytest.raises(WeightError, match="this update lacks " + buffer):
            llm.update_weights({name: tensor for name, tensor in tensors.items() if not is_buffer(name)})
        llm.update_weights(tensors)
        llm.wake_up()
        assert generated(llm) == ours


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_that_cannot_begin(folders: tuple[Path, Path], level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_memory_move(monkeypatch)
    tensors, theirs = tensors_of(folders[1]), answers(folders[1], dtype="float64")
    with LLM(str(folders[0]), **SETTINGS | {"dtype": "float64"}) as llm:
        ours, worker = generated(llm), cast(Any, llm.engine.runner)

        def fail(*_: Any) -> None:
            raise MemoryError("the device is full")

        held = list(find_storages([worker.device_step.model]).values())
        llm.sleep(level)
        with monkeypatch.context() as patched:
            restore = FreedMemory.restore
            patched.setattr(FreedMemory, "restore", lambda memory: fail() if memory._keeps else restore(memory))
            for update in (llm.load_weights, llm.update_weights):
                with pytest.raises(MemoryError):
                    update(tensors)
                assert not any(storage.nbytes() for storage in held), "it sleeps on"
        llm.wake_up()
        assert generated(llm) == ours, "no weight has changed"
        with monkeypatch.context() as patched:
            patched.setattr("outrider.runner.residence.restore_order", fail)
            with pytest.raises(WeightsIncomplete, match="ended after 0 tensors"):
                llm.load_weights(tensors)
        with pytest.raises(WeightsIncomplete):
            generated(llm)
        llm.load_weights(tensors)
        assert generated(llm) == theirs


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_goes_on_if_the_engine_cannot_sleep(folders: tuple[Path, Path], level: int,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, theirs = tensors_of(folders[1]), answers(folders[1])
    with LLM(str(folders[0]), **SETTINGS) as llm:
        llm.start_weight_update()
        llm.load_weights({NAME: tensors.pop(NAME)})
        with monkeypatch.context() as patched:
            patched.setattr("outrider.runner.residence.FreedMemory", _no_memory)
            with pytest.raises(MemoryError, match="no room for a copy"):
                llm.sleep(level)
        with pytest.raises(WeightsIncomplete, match="finish_weight_update"):
            generated(llm)
        llm.load_weights(tensors)
        llm.finish_weight_update()
        assert generated(llm) == theirs


def test_nobody_waits_for_a_request_that_was_refused(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[0]), **SETTINGS) as llm:
        llm.start_weight_update()
        with pytest.raises(WeightsIncomplete):
            llm.llm_engine.add_request("a", list(PROMPTS[0]), greedy(4))
        assert not llm.llm_engine.has_unfinished_requests()
