"""Chooses settings for an engine that starts with `fit`, and gives advice for one that has too little memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from outrider.config import EngineConfig
from outrider.fitting.choice import FitChoice, flags_of
from outrider.fitting.forms import SHORT_CONTEXT, Form
from outrider.fitting.room import GIB, room_of
from outrider.fitting.search import Need, Search, StepPace
from outrider.models.sources.model_source import ModelSource
from outrider.runner.device import pick_device
from outrider.runner.interface import NoDeviceMemory
from outrider.runner.memory import release_dropped

MOST_ADVICE = 3  # settings that are named


class Fitted(NamedTuple):
    """The chosen settings of an engine, and log lines that say what was chosen. Plain data, because another process may
    have made the choice."""

    config: EngineConfig
    lines: list[str]


def fit_to_device(config: EngineConfig, source: ModelSource) -> Fitted:
    """Choose settings that fit the memory that is free on the device now. If the context length was chosen too, `fit`
    stays on in the result, so that the length may still be lowered after steps are measured."""
    search = Search(config, source, room_of(pick_device(config.device)))
    choice = FitChoice.from_search(config, search)
    chosen = replace(config, **choice.settings, fit=config.max_model_len is None)
    flags = " ".join(flags_of(choice.settings)) or "nothing: the defaults fit"
    return Fitted(chosen, [f"fit: chosen {flags}", *choice.lines()])


class MemorySaving(NamedTuple):
    """A change of settings that saves memory."""

    settings: str
    saved_bytes: int
    fits: bool  # by itself
    loss: float


def advice_for(config: EngineConfig, source: ModelSource) -> str:
    """Say how much memory the settings need, and which changed settings would save most. Called after an engine failed
    to start, when its memory is free again."""
    release_dropped()
    search = Search(replace(config, fit=False), source, room_of(pick_device(config.device)))
    need = search.need(Form(), StepPace())
    changes = sorted(_changes(search, need), key=lambda each: (not each.fits, each.fits * each.loss, -each.saved_bytes))
    text = [f"these settings need {need.total_bytes / GIB:.2f} GiB ({need.describe()}) and may take "
            f"{search.budget / GIB:.2f}"]
    text += [f"{each.settings} saves {each.saved_bytes / GIB:.2f} GiB{' and is enough' * each.fits}"
             for each in changes[:MOST_ADVICE]]
    try:
        text.append(f"--fit (fit=True) chooses {' '.join(flags_of(FitChoice.from_search(config, search).settings))}")
    except NoDeviceMemory as error:
        text.append(str(error))
    return "; ".join(text)


def _changes(search: Search, need: Need) -> Iterator[MemorySaving]:
    """Yield changes that save memory: quantization, fewer requests and tokens in a step, and a shorter context."""
    for form in search.forms:
        if form.rounded:
            yield _change(search, need, form, StepPace(), form.loss)
    slower = search.paces[1:]
    if slower:
        enough = (pace for pace in slower if search.need(Form(), pace).total_bytes <= search.budget)
        yield _change(search, need, Form(), next(enough, slower[-1]), 0)
    longest = search.plan(Form(), StepPace())
    length = longest.context if longest is not None else SHORT_CONTEXT
    if length < need.length:
        shorter = search.need(Form(), StepPace(), length)
        yield MemorySaving(f"max_model_len={length}", need.total_bytes - shorter.total_bytes, longest is not None, 0)


def _change(search: Search, need: Need, form: Form, pace: StepPace, loss: float) -> MemorySaving:
    changed = search.need(form, pace)
    names = {name: value for name, value in changed.settings.items() if need.settings[name] != value}
    return MemorySaving(", ".join(f"{name}={value!r}" for name, value in names.items()),
                  need.total_bytes - changed.total_bytes, changed.total_bytes <= search.budget, loss)
