"""ReceiptWriter: writes the receipts of an engine's samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from outrider.config import EngineConfig
from outrider.core.checked_request import CheckedRequest
from outrider.core.file_digests import canonical
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams
from outrider.engine.load import find_model
from outrider.engine.model_digests import describe_kernels, digest_model
from outrider.engine.served_model import ServedModel
from outrider.features.receipts.receipt import VERSION, Receipt, sealed

# Settings of an engine on which bits may depend, beside the model. A replay starts its engine with these.
SETTINGS = (
    "device", "dtype", "tensor_parallel_size", "model_impl", "attention_backend", "kv_cache_dtype",
    "kv_cache_dtype_skip_layers", "index_key_dtype", "page_size", "checkpoint_interval", "logprobs_mode",
    "packed_weights", "keep_quantized", "quantization", "activation_bits", "ignore_config_keys", "hf_overrides",
    "logits_processors",
)
NOT_TOLD = ("output_kind", "return_sampling_mask")  # parameters of the answer, on which no token depends


class ReceiptWriter:
    """Writes receipts for one engine. Making it hashes the model's files, which may take long the first time."""

    def __init__(self, model: ServedModel, key: bytes | None) -> None:
        config = model.config
        if config is None:
            raise ValueError("receipt: the settings of this engine are not known, because it was not built from an "
                             "EngineConfig: leave receipt out")
        if config.load_format == "dummy":
            raise ValueError("receipt: a receipt names the model's files, and random weights (load_format='dummy') "
                             "have none: leave receipt out")
        self._max_len = model.limits.max_len
        self._key = key
        self._model = asdict(digest_model(find_model(config), model.tokenizer, model.loaded_at))
        self._exact, self._settings = config.exact, settings_of(config)
        self._kernels = describe_kernels(model.device_name)

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that a receipt cannot represent."""
        try:
            canonical(params_to_json(params))
        except (TypeError, ValueError) as error:
            raise ValueError("receipt: extra_args must be JSON values, because a receipt lists them "
                             f"({error})") from None

    def write(self, asked: CheckedRequest, prompt: bytes, sampled: Mapping[str, Any]) -> Receipt:
        """Write and sign the receipt of one sample, on any thread. prompt: the canonical bytes of the prompt's token
        ids. sampled: the fields that were noted while the sample ran."""
        model = self._model
        if any(version for version, _, _ in sampled["weights_versions"]):  # those came from no file that is known
            model = model | {"weights": None}
        return sealed({**self._describe(asked), **sampled, "model": model}, self._key, {"prompt_token_ids": prompt})

    def _describe(self, asked: CheckedRequest) -> dict[str, Any]:
        """The fields of the receipt that come from the engine and the request, not from the sample's run."""
        params = params_to_json(asked.sampling)
        num_tokens = len(asked.token_ids)
        room = self._max_len - num_tokens
        ranges = [list(own) for part in asked.input_parts for own in part.two_way_ranges(0, num_tokens)]
        params["max_tokens"] = room if params["max_tokens"] is None else min(params["max_tokens"], room)
        return {"receipt": VERSION, "exact": self._exact, "settings": self._settings, "kernels": self._kernels,
                "prompt_token_ids": list(asked.token_ids), "bidirectional_spans": ranges, "params": params}


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """The engine settings that are written into a receipt, as JSON values."""
    return {name: _plain(getattr(config, name)) for name in SETTINGS}


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """All sampling parameters of a request, as JSON values."""
    told = {field.name: _plain(getattr(params, field.name)) for field in fields(params) if field.name not in NOT_TOLD}
    if params.logit_bias is not None:
        told["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return told


def _plain(value: Any) -> Any:
    match value:
        case tuple() | list():
            return [_plain(each) for each in value]
        case type():
            return f"{value.__module__}:{value.__qualname__}"
        case StructuredOutputsParams():
            return asdict(value)
    return value
