"""Methods and arguments that vLLM's front classes have, but LLM and AsyncLLM do not, with what to use instead. No
torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from outrider.compat.settings import NO_IMAGES
from outrider.core.fields import shown, unknown_name
from outrider.core.params import SamplingParams

# Methods of vLLM's fronts that are not there, with what to do instead.
NOT_SERVED = {
    "classify": "use AsyncLLM.encode with PoolingParams(task='classify')",
    "reward": "use LLM.encode with pooling_task='classify' or 'token_classify'",
    "add_lora": "give lora_request with the prompts, which loads the adapter",
    "remove_lora": "an adapter that was not used lately makes room for others; AsyncLLM has remove_lora",
    "list_loras": "adapters are known by the lora_request of each call",
    "pin_lora": "max_cpu_loras says how many adapters stay in the host's memory",
    "apply_model": "the model lives with its worker: docs/extending.md says how to add parts",
    "get_metrics": "outputs have metrics of their requests, and the server has /metrics",
    "llm_engine": "AsyncLLM has the methods itself, such as get_tokenizer",
    "set_tokenizer": "give tokenizer= when the engine starts",
}
# Arguments of vLLM's methods that are not there, with what to do instead. None asks for nothing, and is accepted.
NO_ARGUMENTS = {
    "guided_options_request": "use structured_outputs of SamplingParams",
    "mm_processor_kwargs": NO_IMAGES,
    "prompt_adapter_request": "prompt adapters are not served: give lora_request",
    "tokenization_kwargs": "encode the prompt with get_tokenizer() and give prompt_token_ids",
    "truncate_prompt_tokens": "encode the prompt with get_tokenizer() and give its last tokens",
}


def refuse_misplaced(call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError for keyword arguments that a method does not have, and say where they belong."""
    for name, value in given.items():
        if name in NO_ARGUMENTS and value is None:
            continue
        if name in NO_ARGUMENTS:
            raise TypeError(f"{call.__qualname__}: {name} is not supported: {NO_ARGUMENTS[name]}")
        refuse_sampling_field(call, name, value)
        known = [parameter for parameter in inspect.signature(call).parameters if parameter != "misplaced"]
        raise TypeError(f"{call.__qualname__}: {unknown_name('argument', name, known)}")


def refuse_sampling_field(call: Callable[..., Any], name: str, value: Any) -> None:
    """Raise TypeError for a sampling parameter that was given beside the sampling parameters."""
    if name in SamplingParams.__dataclass_fields__:
        raise TypeError(f"{call.__qualname__}: {name} is a field of SamplingParams: write "
                        f"sampling_params=SamplingParams({name}={shown(value)})")
