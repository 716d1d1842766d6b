"""Features from outside the package that mask tokens: grammars are not the only one that may. Their requests get the
tokens that `allowed_token_ids` would give them, also with drafts and after preemptions. Two that mask one row leave it
the tokens that both allow, and one that says so decides where a text ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from outrider import feature_list
from outrider.config import EngineConfig
from outrider.core import Admission, Axis, Limits, ScheduledBatch, StepForm
from outrider.core.feature_parts import RequestPart
from outrider.core.params import SamplingParams
from outrider.engine.engine_feature import Caller, EngineFeature
from outrider.feature_list import FeatureEntry, register_feature
from outrider.models.base import Model
from outrider.runner.host_turn import HostTurn
from outrider.runner.row_state import RowState
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of

NAME = "tokens of a list"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "auto": False, "prompt_lookup_min": 1}
EVEN, FEW = list(range(4, 250, 2)), [7, 11, 13]
PARAMS = [greedy(14, allowed_token_ids=EVEN), greedy(9),
          SamplingParams(temperature=1.1, seed=4, max_tokens=14, allowed_token_ids=FEW, ignore_eos=True),
          greedy(12, allowed_token_ids=FEW, repetition_penalty=1.3)]
PROMPTS = [prompt_of(3, 20) * 2, prompt_of(4, 9), prompt_of(3, 20) * 2, prompt_of(5, 33)]


@dataclass(frozen=True)
class Only(RequestPart):
    masks_tokens: ClassVar[bool] = True
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Also(Only):
    """The part of a second feature."""


@dataclass(frozen=True)
class Ends(Only):
    decides_end: ClassVar[bool] = True


class OnlyRows(HostTurn):
    def __init__(self, state: RowState, limits: Limits, kind: type[Only] = Only) -> None:
        self._state, self._run, self._kind = state, limits.extent(Axis.RUN), kind
        self._rows: dict[int, Only] = {}

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._rows.pop(admission.row, None)
            if (part := admission.request.part(self._kind)) is not None:
                self._rows[admission.row] = part

    def reset(self) -> None:
        self._rows.clear()

    def turn(self, batch: ScheduledBatch, *, runs_ahead: bool) -> None:
        masks = self._state.sampling.masks
        for row, num_drafts, samples in zip(batch.rows, batch.num_drafts, batch.samples, strict=True):
            if samples and row in self._rows:
                bits = np.zeros(32 * masks.num_words, dtype=bool)
                bits[list(self._rows[row].token_ids)] = True
                words = np.packbits(bits, bitorder="little").view(np.int32)
                masks.write([row * self._run + j for j in range(1 + num_drafts)], np.tile(words, (1 + num_drafts, 1)))


class OnDevice(WorkerFeature):
    def __init__(self, config: EngineConfig) -> None: ...

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        step.take_turns(OnlyRows(step.state, limits))


class InEngine(EngineFeature):
    reads_extra_args = True
    num_made = 0

    def __init__(self, config: EngineConfig) -> None:
        InEngine.num_made += 1

    def check_params(self, params: SamplingParams) -> None:
        if (params.extra_args or {"only": None}).keys() != {"only"}:
            raise ValueError("extra_args: only 'only' is known")

    def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart] | None:
        if params.extra_args is None:
            return None
        part = Only(tuple(params.extra_args["only"]))
        return lambda: part


@pytest.fixture(params=["by the settings", "by a request"])
def is_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setattr(InEngine, "num_made", 0)
    is_late = request.param == "by a request"
    register_feature(FeatureEntry(NAME, OnDevice, InEngine, parameter="extra_args" if is_late else None))
    yield is_late
    feature_list._registered.pop(NAME)


def with_masks(params: SamplingParams) -> SamplingParams:
    """Parameters that ask the feature for what these ask of the sampler."""
    if params.allowed_token_ids is None:
        return params
    return replace(params, allowed_token_ids=None, extra_args={"only": params.allowed_token_ids})


@pytest.mark.parametrize("settings", [{}, {"speculative_config": DRAFTS}, {"overlap": False}])
def test_masks_of_an_outside_feature_are_allowed_tokens(settings: dict[str, Any], is_late: bool) -> None:
    asks = [Ask(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    masked = [replace(ask, params=with_masks(ask.params)) for ask in asks]
    with Rig(tiny_model("llama"), max_num_seqs=3, **settings) as rig:
        wanted = tokens_of(rig.run(asks))
        assert {batch.mode.form for batch in rig.batches} == {StepForm.WHOLE}
    before = InEngine.num_made
    with Rig(tiny_model("llama"), max_num_seqs=3, **settings) as rig:
        assert InEngine.num_made == before + (not is_late), "made when a request asks for it"
        assert tokens_of(rig.run(masked, after_step=rig.preempt)) == wanted
        assert StepForm.SPLIT in {batch.mode.form for batch in rig.batches}
        assert InEngine.num_made == before + 1
        with pytest.raises(ValueError, match="only 'only' is known"):
            rig.engine.checks.check([5], greedy(3, extra_args={"other": 1}))


def register(monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Only]) -> None:
    """A feature that masks the tokens of `extra_args[name]`."""
    class Device(OnDevice):
        def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
            step.take_turns(OnlyRows(step.state, limits, kind))

    class Checks(EngineFeature):
        reads_extra_args = True

        def __init__(self, config: EngineConfig) -> None: ...

        def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart] | None:
            found = (params.extra_args or {}).get(name)
            return None if found is None else lambda: kind(tuple(found))

    monkeypatch.setitem(feature_list._registered, name, FeatureEntry(name, Device, Checks))


@pytest.mark.parametrize("settings", [{}, {"speculative_config": DRAFTS}])
def test_two_features_leave_a_row_the_tokens_that_both_allow(settings: dict[str, Any],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "only", Only)
    register(monkeypatch, "also", Also)
    one, other = list(range(4, 60)), list(range(30, 250))
    with Rig(tiny_model("llama"), max_num_seqs=3, **settings) as rig:
        wanted = tokens_of(rig.run([Ask(prompt, greedy(14, allowed_token_ids=ids))
                                    for ids in (list(range(30, 60)), one, other) for prompt in PROMPTS]))
        masked = [{"only": one, "also": other}, {"only": one}, {"also": other}]
        found = tokens_of(rig.run([Ask(prompt, greedy(14, extra_args=lists))
                                   for lists in masked for prompt in PROMPTS], after_step=rig.preempt))
    assert found == wanted


@pytest.mark.parametrize(("kind", "fields", "length", "reason"), [
    (Ends, {"ignore_eos": True}, 1, "stop"), (Ends, {"min_tokens": 4}, 1, "stop"),
    (Only, {"ignore_eos": True}, 6, "length"), (Only, {"min_tokens": 4}, 0, "error")])
def test_masks_end_a_text_only_if_their_feature_says_so(kind: type[Only], fields: dict[str, Any], length: int,
                                                        reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks allow the model's end id alone."""
    register(monkeypatch, "only", kind)
    with Rig(tiny_model("llama"), eos_ids=(9,)) as rig:
        (output,) = rig.run([Ask(PROMPTS[0], SamplingParams(
            temperature=0, max_tokens=6, extra_args={"only": [9]}, **fields))])
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (length, reason)


def test_ids_that_end_a_text_are_counted_with_those_that_masks_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "only", Ends)
    with Rig(tiny_model("llama"), eos_ids=(9,)) as rig:
        most = rig.engine.limits.max_stop_ids
        params = greedy(4, stop_token_ids=list(range(10, 10 + most)), ignore_eos=True)
        rig.engine.checks.check([5], params)
        with pytest.raises(ValueError, match=f"{most + 1} stop token ids"):
            rig.engine.checks.check([5], replace(params, extra_args={"only": [9]}))
