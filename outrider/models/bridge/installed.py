"""Find the installed transformers' model class and config object for a config, or refuse the config by name.

No code of a checkpoint is run: `auto_map` is never followed, and classes come only from the installed package.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, NamedTuple

from outrider.core.fields import shown
from outrider.models.bridge.refusal import words_of
from outrider.models.config import ConfigError, ConfigReader
from outrider.models.config_reader import LARGEST
from outrider.models.harmless_keys import HARMLESS, NOT_SERVED
from outrider.models.sources.quantization import KEY, read_quantization

LAYERS = "num_hidden_layers"
EXTRA = "pip install outrider[transformers]"
# Older names of settings, which transformers' configs understand beside those that they declare.
OLDER_NAMES = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct",
               "rotary_emb_base", "hidden_activation", "layer_types", "sliding_window_pattern",
               "_sliding_window_pattern")
LEFT_OUT = (KEY, "auto_map", "dtype", "torch_dtype")  # the engine reads formats and chooses the dtype
STATES = "it keeps a state of its own beside keys and values, which pages cannot hold"
SCALED_BY_LENGTH = ("longrope",)  # ropes whose frequencies depend on the longest text of a batch


def import_transformers() -> Any:
    return import_module("transformers")


def _decoders() -> set[str]:
    import_transformers()
    names = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return {name for entry in names.values() for name in ([entry] if isinstance(entry, str) else entry)}


def find_class(reader: ConfigReader) -> type[Any]:
    """Return the transformers class for the config's architecture. Refuse a class whose attention the engine's
    attention cannot replace."""
    try:
        library = import_transformers()
    except ImportError as error:
        raise reader.refusal("architectures", "Outrider has no code of its own for it, and the package transformers, "
                                              f"which might, cannot be imported ({error})",
                             f"To try transformers' code: {EXTRA}.") from error
    architecture = str(reader.required("architectures", list)[0])
    version = f"transformers {library.__version__}"
    if architecture not in _decoders():
        code = "; the code that auto_map names is never run" if reader.has("auto_map") else ""
        raise reader.refusal("architectures", f"neither Outrider nor {version} has a text model of this name{code}",
                             "`outrider models` lists what can be served.")
    found: type[Any] = getattr(library, architecture)
    if getattr(found, "_is_stateful", False):
        raise reader.refusal("architectures", STATES)
    if not _calls_attention_functions(found):
        raise reader.refusal("architectures", f"its code in {version} does not let another package compute its "
                                              "attention (it lacks _supports_attention_backend)")
    return found


def _calls_attention_functions(model_class: type[Any]) -> bool:
    """Whether a class's code may call the attention function that its config names. Some older classes call it without
    declaring so. The outline then checks that every layer calls it."""
    table = "ALL_ATTENTION_FUNCTIONS"
    return bool(getattr(model_class, "_supports_attention_backend", False)) \
        or hasattr(import_module(model_class.__module__), table)


class MadeConfig(NamedTuple):
    values: Any  # transformers' config object
    ignored: list[str]  # keys of the file that transformers does not read


def make_config(reader: ConfigReader, model_class: type[Any]) -> MadeConfig:
    """Make the config of a model class from the engine's config. Raises ConfigError for settings that the bridge cannot
    serve."""
    for key in ("is_encoder_decoder", "add_cross_attention"):
        reader.must_equal(key, False, default=False)
    if quantization := reader.get(KEY, dict, {}):
        try:
            read_quantization(quantization)
        except ValueError as error:
            raise reader.refusal(KEY, str(error), "") from None
    config_class = model_class.config_class
    kind = reader.get("model_type", str, "")
    if kind and _config_of(kind) is not config_class:
        raise reader.refusal("model_type", f"the class {model_class.__name__} has model_type "
                                           f"{config_class.model_type!r}")
    known = declared_keys(config_class)
    reader.passes_over(*known)
    values = {key: value for key, value in reader.values.items() if key not in LEFT_OUT}
    try:
        config = config_class.from_dict(values)
        derived = config_class.from_dict({key: value for key, value in values.items() if key in known})
    except Exception as error:  # the config classes raise errors of several libraries
        raise ConfigError(f"{reader.source}: {config_class.__name__} of transformers refuses this config: "
                          f"{words_of(error)}. Correct the config, or fetch it again") from error
    _check_layers(reader, config)
    # What the class computes from other keys, and saves beside them, says nothing new. Other keys mean nothing to the
    # code that runs; those that change a model are refused.
    others = [key for key in values if key not in known | HARMLESS.keys() | NOT_SERVED.keys()]
    reader.passes_over(*others)
    return MadeConfig(config, [key for key in others if getattr(derived, key, None) != values[key]])


def declared_keys(config_class: Any) -> set[str]:
    """Return the keys that a config class of transformers reads."""
    names = getattr(config_class, "attribute_map", {})
    keys = {*OLDER_NAMES, *names, *names.values()}
    for base in config_class.__mro__[:-1]:
        keys |= {*getattr(base, "__annotations__", {}), *inspect.signature(base).parameters}
    return keys


def _config_of(model_type: str) -> type[Any] | None:
    auto = import_module("transformers.models.auto.configuration_auto")
    return auto.CONFIG_MAPPING[model_type] if model_type in auto.CONFIG_MAPPING else None


def _check_layers(reader: ConfigReader, config: Any) -> None:
    """Refuse layers and ropes that depend on more than a token, its position, and the keys and values before it. Also
    refuse absurd numbers of layers, which would take hours to build."""
    count, most = getattr(config, LAYERS, None), LARGEST[LAYERS]
    if isinstance(count, int) and not 0 <= count <= most:
        raise reader.refusal(LAYERS, f"it must be from 0 to {most}")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            why = "" if kind == "chunked_attention" else f": {STATES}"
            raise reader.refusal("layer_types", f"layers of type {kind!r} cannot run through transformers' code{why}")
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [ropes.get("rope_type"), *(rope.get("rope_type") for rope in ropes.values() if isinstance(rope, dict))]
    for kind in kinds:
        if kind in SCALED_BY_LENGTH:
            raise ConfigError(f"{reader.source}: rope_type={kind!r} is not supported with model code of transformers, "
                              "which chooses the rope's frequencies by the longest text of a batch; this checkpoint "
                              "cannot be served, unless `outrider models` lists its architecture (then leave "
                              "model_impl out)")


def positions_of(reader: ConfigReader, config: Any) -> int:
    """Return the number of positions that the model was made for."""
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        raise ConfigError(f"{reader.source}: max_position_embeddings must be an integer above 0, got {shown(found)}: "
                          "add the number of positions that the model was made for")
    return found

