"""make_drafter: makes the drafter of a speculative config, from a table of methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from outrider.config import SpeculativeConfig
from outrider.core.drafter_faults import words_of
from outrider.core.fields import Range, check_value, shown
from outrider.core.lazy_exports import import_attribute
from outrider.drafters.base import DraftBuild, Drafter
from outrider.drafters.combined import CombinedDrafter
from outrider.models.sources.model_source import WeightError

Maker = Callable[[SpeculativeConfig, DraftBuild], Drafter]
METHOD_OF_FILES = "outrider.drafters.files:with_method"  # where a model is named, which may say what it is for
# The makers of drafters by method, each imported when a config asks for it.
MAKERS = {
    "ngram": "outrider.drafters.ngram:ngram_drafter",
    "draft_model": "outrider.drafters.draft_model:model_drafter",
    "eagle": "outrider.drafters.eagle:eagle_drafter",
    "eagle3": "outrider.drafters.eagle:eagle3_drafter",
    "block": "outrider.drafters.block:block_drafter",
    "gemma4_assistant": "outrider.drafters.gemma_assistant:assistant_drafter",
    "mtp": "outrider.drafters.mtp:mtp_drafter",
}
ON_HOST = ("suffix",)  # drafts are made on the host: there is no drafter on the device


def make_drafter(config: SpeculativeConfig, build: DraftBuild) -> Drafter | None:
    """Make the drafter of a config; None if all drafting happens on the host. On the meta device it has no weights, and
    drafters from outside the package are left out. Raises ValueError for a drafter that does not fit."""
    if config.model is not None:
        config = import_attribute(METHOD_OF_FILES)(config, build)
    drafters: list[Drafter] = []
    for method in config.methods:
        num_layers = sum(len(drafter.attention_layers) for drafter in drafters)
        try:
            drafter = _make(method, config, replace(build, num_drafter_layers=num_layers))
        except WeightError as error:
            files = build.target_source if config.model is None else config.model
            raise WeightError(f"speculative_config: {method!r}: the files of {files} cannot be used as this drafter: "
                              f"{error}") from None
        if drafter is not None:
            drafters.append(drafter)
    if not drafters:
        return None
    return drafters[0] if len(drafters) == 1 else CombinedDrafter(drafters)


def _make(method: str, config: SpeculativeConfig, build: DraftBuild) -> Drafter | None:
    if method in MAKERS:
        maker: Maker = import_attribute(MAKERS[method])
        return maker(config, build)
    return None if method in ON_HOST or build.is_outline else _custom(method, config, build)


def _custom(path: str, config: SpeculativeConfig, build: DraftBuild) -> Drafter:
    """Make the drafter of `package.module:Class`, by calling Class(num_speculative_tokens, target model)."""
    try:
        kind = import_attribute(path)
    except Exception as error:  # somebody else's module may raise anything
        hint = " (its folder must be in PYTHONPATH)" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"speculative_config: cannot import the drafter {path!r}: {words_of(error)}{hint}") from error
    if not callable(kind) or (isinstance(kind, type) and not issubclass(kind, Drafter)):
        raise ValueError(f"speculative_config: {path} is not a subclass of outrider.drafters.base.Drafter: "
                         "derive it from this class")
    try:
        made = kind(config.num_speculative_tokens, build.target)
    except Exception as error:
        raise ValueError(f"speculative_config: {path}(num_speculative_tokens, target) raised {words_of(error)}"
                         ) from error
    if not isinstance(made, Drafter):
        raise ValueError(f"speculative_config: {path} made {shown(made)}, not an outrider.drafters.base.Drafter: let "
                         "it return one")
    _check_declared(made, path, build.target.num_layers, config.num_speculative_tokens)
    return made


def _check_declared(drafter: Drafter, path: str, num_layers: int, max_drafts: int) -> None:
    """Refuse wrong values of attributes that would make every step of the target fail."""
    check_value(f"speculative_config: {path}.name", str, drafter.name)
    layers = list[Annotated[int, Range(0, num_layers)]]
    check_value(f"speculative_config: {path}.aux_layers", layers, drafter.aux_layers)
    check_value(f"speculative_config: {path}.lookahead", Annotated[int, Range(0, max_drafts + 1)], drafter.lookahead)
