"""ReceiptWriter writes the receipts of an engine's samples; ReceiptOutput gathers what one of them says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from typing import Any

from outrider.config import EngineConfig
from outrider.core import RequestResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.file_digests import canonical
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey
from outrider.core.params import SamplingParams
from outrider.core.request_keeper import RequestKeepers
from outrider.core.structured import StructuredOutputsParams
from outrider.engine.load import find_model
from outrider.engine.output import SampleOutput
from outrider.engine.served_model import ServedModel
from outrider.engine.text import Tokenizer
from outrider.features.receipts.digests import describe_kernels, digest_model
from outrider.features.receipts.receipt import VERSION, Receipt, read_key, sealed
from outrider.lora_request import AdapterLoads, LoadedAdapter

# Settings of an engine on which bits may depend, beside the model. A replay starts its engine with these.
SETTINGS = (
    "device", "dtype", "tensor_parallel_size", "model_impl", "attention_backend", "kv_cache_dtype",
    "kv_cache_dtype_skip_layers", "index_key_dtype", "page_size", "checkpoint_interval", "logprobs_mode",
    "packed_weights", "keep_quantized", "quantization", "activation_bits", "ignore_config_keys", "hf_overrides",
    "logits_processors",
)
NOT_TOLD = ("output_kind",)  # parameters of the stream


class ReceiptWriter:
    """Writes receipts for one engine. Making it hashes the model's files, which may take long the first time."""

    def __init__(self, model: ServedModel) -> None:
        config = model.config
        if config is None:
            raise ValueError("receipt: the settings of this engine are not known, because it was built elsewhere")
        if config.load_format == "dummy":
            raise ValueError("receipt: a receipt names the model's files, and random weights (load_format='dummy') "
                             "have none")
        self._max_len = model.limits.max_len
        self._tokenizer = model.tokenizer
        self._key = None if config.receipt_key_file is None else read_key(config.receipt_key_file)
        self._model = asdict(digest_model(find_model(config), model.tokenizer, model.loaded_at))
        self._exact, self._settings = config.exact, settings_of(config)
        self._kernels = describe_kernels(model.device_name)

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that a receipt cannot represent."""
        try:
            canonical(params_to_json(params))
        except (TypeError, ValueError) as error:
            raise ValueError(f"receipt: extra_args must be JSON values, to be written down ({error})") from None

    def make_output(self, key: SampleKey, asked: CheckedRequest, keepers: RequestKeepers) -> SampleOutput:
        """Make the object that turns a sample's tokens into its output, which ends with a receipt."""
        if any(part.vectors(0, len(asked.token_ids)) is not None for part in asked.input_parts):
            raise ValueError("receipt: a receipt tells the token ids of a prompt, and not prompt_embeds beside them: "
                             "leave these out")
        asks = self._describe(key, asked, keepers)

        def write(versions: Sequence[tuple[int, int, int]], output: dict[str, Any]) -> Receipt:
            model = self._model
            if any(version for version, _, _ in versions):  # those weights came from no file that is known
                model = model | {"weights": None}
            return sealed({**asks, "model": model, "weights_versions": [list(own) for own in versions],
                           "output": output}, self._key)

        return ReceiptOutput(key, asked.sampling, self._tokenizer, write)

    def _describe(self, key: SampleKey, asked: CheckedRequest, keepers: RequestKeepers) -> dict[str, Any]:
        """The fields of the receipt that are known before the first token."""
        params = params_to_json(asked.sampling)
        num_tokens = len(asked.token_ids)
        room = self._max_len - num_tokens
        ranges = [list(own) for part in asked.input_parts for own in part.two_way_ranges(0, num_tokens)]
        params["max_tokens"] = room if params["max_tokens"] is None else min(params["max_tokens"], room)
        return {"receipt": VERSION, "exact": self._exact, "adapter": _describe_adapter(asked, keepers),
                "settings": self._settings, "kernels": self._kernels, "prompt_token_ids": list(asked.token_ids),
                "bidirectional_spans": ranges, "params": params, "sample_index": key.sample_index}


class ReceiptOutput(SampleOutput):
    """The output of a sample, which keeps the sample's tokens and log-probabilities until its end."""

    def __init__(self, key: SampleKey, params: SamplingParams, tokenizer: Tokenizer | None,
                 write: Callable[[Sequence[tuple[int, int, int]], dict[str, Any]], Receipt]) -> None:
        super().__init__(key, params, tokenizer)
        self._write = write
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions = [(key.weights_version, 0)]  # with the first token of each

    def use_weights(self, version: int, *, in_place: bool) -> None:
        """See SampleOutput. A version that goes on in place is told even if it has no tokens, since later tokens depend
        on it."""
        super().use_weights(version, in_place=in_place)
        if not in_place and self._versions[-1][1] == len(self._token_ids):
            self._versions.pop()
        self._versions.append((version, len(self._token_ids)))

    def replay(self, token_ids: list[int]) -> str:
        """See SampleOutput. The log-probabilities and weight versions of these tokens are not known any more, so the
        receipt says from which token on it has them."""
        self._token_ids = list(token_ids)
        self._versions = [(self._versions[-1][0], len(token_ids))]
        return super().replay(token_ids)

    def take(self, result: RequestResult) -> OutputIncrement:
        increment = super().take(result)
        self._token_ids += increment.token_ids
        # + 0.0: one zero, since some writers of JSON have no second one.
        self._logprobs += [entry.logprobs[0] + 0.0 for entry in increment.logprobs or ()]
        end = increment.end
        if end is None or end.error is not None:
            return increment
        return increment._replace(end=end._replace(receipt=self._write(self._spans(), self._told(end))))

    def _spans(self) -> list[tuple[int, int, int]]:
        """The versions of the weights, each with the first token that it computed and the token after its last."""
        num_tokens = len(self._token_ids)
        starts = [*(own for own in self._versions if own[1] < num_tokens), (0, num_tokens)]
        return [(version, start, end) for (version, start), (_, end) in pairwise(starts)]

    def _told(self, end: SampleEnd) -> dict[str, Any]:
        return {"token_ids": list(self._token_ids), "logprobs": list(self._logprobs),
                "logprobs_start": len(self._token_ids) - len(self._logprobs),
                "finish_reason": end.finish_reason, "stop_reason": end.stop_reason}


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


def _describe_adapter(asked: CheckedRequest, keepers: RequestKeepers) -> dict[str, str] | None:
    part = asked.part(LoadedAdapter)
    if part is None:
        return None
    loads = keepers.find(AdapterLoads)  # type: ignore[type-abstract]
    assert loads is not None, "a request with an adapter was added without adapters"
    name, digest = loads.identity(part.number)
    return {"name": name, "digest": digest}
