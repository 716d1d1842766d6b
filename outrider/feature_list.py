"""The list of the engine's features, in order: the one file that names them. No torch.

A feature is a folder under `outrider/features/`. It has up to two halves: classes in the engine's process and classes
in the worker's. The core imports no feature and calls it only through the interfaces below. The halves are imported by
name, and only if the settings or a request ask for the feature. `register_feature` adds one from outside the package.

| interface | who calls it |
|---|---|
| `core/feature_parts.py` RequestPart, BatchPart, ResultPart, LimitsPart | no caller: data of features in these |
| `runner/worker_feature.py` WorkerFeature | a worker, when it is made: sizes, memory, what it adds to steps |
| `core/step_part.py` StepPart | every step on the device |
| `drafters/observer.py` DraftObserver | every step, between its tokens and its drafts |
| `core/background_work.py` BackgroundWork | a worker: when it is ready, pauses, gets new weights or ends |
| `core/hidden_request.py` HiddenTask, HiddenGatherer, HiddenOutput | the engine, for a request without text |
| `layers/context.py` DeltaSource, RowDeltas | linear layers, whose outputs a feature changes row by row |
| `runner/logits_part.py` LogitsPart | every step whose logits a feature edits, on the device |
| `runner/host_turn.py` HostTurn | every step that samples by masks, between its forward pass and its sampler |
| `engine/engine_feature.py` EngineFeature | an engine, for its resources; checks of requests, for their parts |
| `runner/commands.py` Command, Errand | a worker: between two steps, or while steps run |
| `sched/row_resources.py` RowResource | the scheduler, when a request takes or leaves a row |
| `core/request_keeper.py` RequestKeeper | the engine, when a request comes or ends |
| `engine/input_reader.py` InputReader | the checks of a request whose prompt has a key of the feature |
| `core/input_part.py` InputPart | the scheduler, the cache and the steps, for this prompt |
| `core/sample_addition.py` SampleAddition | the output of a sample, to which it adds a value |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.config import EngineConfig
from outrider.core.lazy_exports import import_attribute
from outrider.core.params import SamplingParams

Half = Callable[..., Any] | str  # a class, or `module:class`


@dataclass(frozen=True)
class FeatureEntry:
    """One feature in the list: its classes, and the settings or the request parameter that switch it on."""

    name: str
    worker: Half | None = None  # a WorkerFeature, if it has this half
    engine: Half | None = None  # an EngineFeature, if it has this half
    request: Half | None = None  # what makes outputs of requests that ask for it
    reader: Half | None = None  # an InputReader: inputs of a prompt beside token ids
    prompt_keys: Mapping[str, Any] = field(default_factory=dict)  # the reader's keys of a prompt, with their types
    whole_prompts: tuple[str, ...] = ()  # those of prompt_keys that make a prompt without text or token ids
    slow_keys: tuple[str, ...] = ()  # those of prompt_keys whose values take long to check
    is_on: Callable[[EngineConfig], bool] = lambda config: True
    serves: Callable[[Any], bool] = lambda model: True  # whether its half in a worker is made for this model
    # The field of SamplingParams by which requests ask for it: its halves are made when the first one does.
    parameter: str | None = None
    is_early: Callable[[EngineConfig], bool] = lambda config: False  # or made at start, since the settings speak of it
    # Whether the settings ask for it on behalf of a request with these parameters.
    is_implied: Callable[[EngineConfig, SamplingParams], bool] = lambda config, params: False
    flag_help: Mapping[str, str] = field(default_factory=dict)  # of the flags of its settings and parameters, by name


FEATURES = (
    FeatureEntry("adapters", worker="outrider.features.adapters.on_device:AdaptersOnDevice",
                 engine="outrider.features.adapters.in_engine:AdaptersInEngine",
                 is_on=lambda config: config.enable_lora),
    FeatureEntry("logits processors", worker="outrider.features.processors.on_device:ProcessorsOnDevice",
                 engine="outrider.features.processors.in_engine:ProcessorsInEngine",
                 is_on=lambda config: bool(config.logits_processors)),
    FeatureEntry("drafter that learns", worker="outrider.features.learning.on_device:LearningOnDevice",
                 is_on=lambda config: config.adapt_drafter),
    FeatureEntry("grammars", worker="outrider.features.grammars.on_device:GrammarsOnDevice",
                 engine="outrider.features.grammars.in_engine:GrammarsInEngine", parameter="structured_outputs"),
    FeatureEntry("cache beyond the device", worker="outrider.features.tiers.tiers_on_device:TiersOnDevice",
                 engine="outrider.features.tiers.tiers_in_engine:TiersInEngine",
                 reader="outrider.features.tiers.session_reader:SessionReader",
                 prompt_keys={"cache_session": str | tuple | None},
                 is_on=lambda config: bool(config.host_cache_memory or config.disk_cache_dir)),
    FeatureEntry("pooling", request="outrider.features.pooling.gatherer:PooledVectors"),
    FeatureEntry("bidirectional spans", reader="outrider.features.spans.reader:SpansReader",
                 prompt_keys={"bidirectional_spans": list | tuple | None}),
    FeatureEntry("prompt embeddings", reader="outrider.features.embeddings.reader:EmbedsReader",
                 prompt_keys={"prompt_embeds": Any, "prompt_embeds_positions": list | tuple | None},
                 whole_prompts=("prompt_embeds",), slow_keys=("prompt_embeds",)),
    FeatureEntry("images", worker="outrider.features.images.encoder_on_device:ImagesOnDevice",
                 reader="outrider.features.images.reader:ImagesReader",
                 prompt_keys={"multi_modal_data": dict | None, "mm_processor_kwargs": dict | None,
                              "multi_modal_uuids": dict | None}, slow_keys=("multi_modal_data",),
                 is_on=lambda config: config.takes_images, serves=lambda model: model.sees,
                 flag_help={"limit_mm_per_prompt": "images of one prompt, as '{\"image\": 2}'; 0: the vision tower is "
                                                   "never loaded"}),
    FeatureEntry("sampling masks", engine="outrider.features.masks.masks_in_engine:MasksInEngine",
                 parameter="return_sampling_mask",
                 is_implied=lambda config, params: config.return_sampling_mask and params.filters,
                 flag_help={"return_sampling_mask": "the ids that top-k, top-p and min-p kept at each place"}),
    FeatureEntry("routed experts", worker="outrider.features.routing.routing_on_device:RoutingOnDevice",
                 engine="outrider.features.routing.routing_in_engine:RoutingInEngine",
                 is_on=lambda config: config.enable_return_routed_experts,
                 flag_help={"enable_return_routed_experts": "samples have the experts that each layer chose for every "
                                                            "token, as trainers replay them"}),
    FeatureEntry("receipts", engine="outrider.features.receipts.in_engine:ReceiptsInEngine", parameter="receipt",
                 is_early=lambda config: config.receipt_key_file is not None,
                 flag_help={"receipt_key_file": "a file with the operator's key, which signs receipts",
                            "receipt": "the answer says what its tokens depend on, for `outrider replay` (with "
                                       "--json)"}),
)
_registered: dict[str, FeatureEntry] = {}  # from outside the package


def register_feature(entry: FeatureEntry) -> None:
    """Add a feature to all engines that start from now on in this process, and in the processes of their workers."""
    if entry.name in {own.name for own in FEATURES}:
        raise ValueError(f"a feature of the package has the name {entry.name!r}: choose another")
    _registered[entry.name] = entry


def registered_names() -> tuple[str, ...]:
    """The names of features that `register_feature` has added."""
    return tuple(_registered)


def require_registered(names: Sequence[str]) -> None:
    """Raise ValueError if this worker process lacks a feature that is registered in its parent process. `names`: the
    features of the parent. Without the check, a feature whose half in the worker is missing would silently do
    nothing."""
    for name in names:
        if name not in _registered:
            raise ValueError(f"the feature {name!r} is not registered in the worker's process, which imports the main "
                             "module anew: call register_feature at the top level of that module")


def worker_features(config: EngineConfig, model: Any) -> list[Any]:
    """Make the WorkerFeature of every feature that the settings ask for and that serves this model."""
    return [_find(entry.name, entry.worker)(config) for entry in _asked_for(config)
            if entry.worker is not None and entry.serves(model)]


def engine_features(config: EngineConfig) -> list[Any]:
    """Make the EngineFeature of every feature that the settings ask for."""
    return [_find(entry.name, entry.engine)(config) for entry in _asked_for(config) if entry.engine is not None]


def request_half(name: str) -> Any:
    """Return the class of a feature that builds the outputs of requests, such as pooled hidden states."""
    return _need(name, _entry(name).request, "makes outputs of requests")


def asking_parameters() -> list[tuple[str, str]]:
    """Return the features that single requests switch on: pairs of a field of SamplingParams and the feature's name."""
    return [(entry.parameter, entry.name) for entry in _all_entries() if entry.parameter is not None]


def implied_parameters(config: EngineConfig, params: SamplingParams) -> list[str]:
    """The parameters that the settings imply for a request with these parameters."""
    return [entry.parameter for entry in _all_entries() if entry.parameter and entry.is_implied(config, params)]


def early_features(config: EngineConfig) -> list[str]:
    """Return the features that are made when the engine starts, because the settings mention them. Without such
    settings the first request that asks for the feature makes it."""
    return [entry.name for entry in _all_entries() if entry.parameter is not None and entry.is_early(config)]


def flag_help() -> dict[str, str]:
    """Return help texts for command-line flags of features, by the name of the setting or parameter."""
    return {name: text for entry in _all_entries() for name, text in entry.flag_help.items()}


def engine_half(name: str) -> Any:
    """Return the EngineFeature class of a feature: its half in the engine's process."""
    return _need(name, _entry(name).engine, "has a half in the engine")


def worker_half(name: str) -> Any:
    """Return the WorkerFeature class of a feature: its half in a worker."""
    return _need(name, _entry(name).worker, "has a half in a worker")


def has_worker_half(name: str) -> bool:
    return _entry(name).worker is not None


def feature_object(name: str, place: str) -> Any:
    """Import an object from a feature's folder. Code outside the feature uses this to import it only when it is needed.
    place: `module:object`."""
    return _find(name, place)


def drop_session(engine: Any, session: Any) -> bool:
    """Delete the pages of a cache session beyond the device. Called on the thread that calls `Engine.step`."""
    drop = feature_object("cache beyond the device", "outrider.features.tiers.tiers_in_engine:drop_session")
    return bool(drop(engine, session))


def prompt_keys() -> dict[str, Any]:
    """Return the keys of a prompt dict that features read (such as prompt_embeds), with the types of their values."""
    return {key: declared for entry in _all_entries() for key, declared in entry.prompt_keys.items()}


def whole_prompts() -> list[str]:
    """Return the keys of a prompt dict that can replace its text and token ids, such as prompt_embeds."""
    return [key for entry in _all_entries() for key in entry.whole_prompts]


def is_slow_prompt(prompt: Mapping[str, Any]) -> bool:
    """Whether the prompt has a key whose value a feature takes long to check, so that the check runs in a thread."""
    return any(prompt.get(key) is not None for entry in _all_entries() for key in entry.slow_keys)


def input_readers(prompt: Mapping[str, Any]) -> list[Any]:
    """Return the InputReader classes of the features whose keys the prompt has."""
    return [_find(entry.name, entry.reader) for entry in _all_entries() if entry.reader is not None
            and any(prompt.get(key) is not None for key in entry.prompt_keys)]


def _all_entries() -> tuple[FeatureEntry, ...]:
    return (*FEATURES, *_registered.values())


def _asked_for(config: EngineConfig) -> list[FeatureEntry]:
    """Return the features that the settings switch on."""
    return [entry for entry in _all_entries() if entry.parameter is None and entry.is_on(config)]


def _entry(name: str) -> FeatureEntry:
    return next((entry for entry in _all_entries() if entry.name == name), FeatureEntry(name))


def _need(name: str, half: Half | None, role: str) -> Any:
    if half is None:
        raise ValueError(f"no feature {name!r} {role}: register it with register_feature, or correct the name")
    return _find(name, half)


def _find(name: str, half: Half) -> Any:
    if not isinstance(half, str):
        return half
    try:
        return import_attribute(half)
    except ModuleNotFoundError as error:
        if error.name is None or not half.startswith(error.name):
            raise
        raise ValueError(f"this installation of outrider cannot use {name}: the package {error.name} is "
                         "missing") from None
