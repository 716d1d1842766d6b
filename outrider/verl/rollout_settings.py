"""Settings of verl's rollouts, as settings of an engine and of requests. Neither ray nor verl is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME_NAMES = ("dtype", "load_format", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "logprobs_mode",
              "enable_prefix_caching", "gpu_memory_utilization", "enforce_eager", "quantization")
WITHOUT_EFFECT = ("spaces_between_special_tokens",)


def engine_settings(config: Any, model_config: Any, replica_rank: int) -> dict[str, Any]:
    """The settings of a replica's engine. Those in `rollout.engine_kwargs.outrider` come last."""
    settings = {name: value for name in SAME_NAMES if (value := getattr(config, name)) is not None}
    settings |= {"model": str(model_config.local_path), "tensor_parallel_size": config.tensor_model_parallel_size,
                 "seed": replica_rank + config.seed, "exact": config.full_determinism, "max_logprobs": -1,
                 "enable_return_routed_experts": config.enable_rollout_routing_replay}
    if _uses_mtp(config):
        settings["speculative_config"] = {"method": config.mtp.method,
                                          "num_speculative_tokens": config.mtp.num_speculative_tokens}
    rank, lora = getattr(model_config, "lora_rank", 0), getattr(model_config, "lora", None) or {}
    if (rank or lora.get("rank", 0)) and not lora.get("merge", False):
        raise NotImplementedError("weights of an adapter alone are not supported: set lora.merge=True, and the merged "
                                  "weights come with each update")
    own: Mapping[str, Any] = (config.engine_kwargs or {}).get("outrider") or {}
    return settings | {name: value for name, value in own.items() if value is not None}


def sleep_level(config: Any, *, is_hybrid: bool) -> int:
    """2 drops the weights, which the next update brings. A drafter's own weights do not come with it."""
    return 2 if is_hybrid and not _uses_mtp(config) and not config.layered_summon else 1


def sampling_settings(config: Any, given: Mapping[str, Any], prompt_len: int) -> dict[str, Any]:
    """The fields of SamplingParams for one request. Its length is bounded by the rollout's, and by the room."""
    params = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    usual = min(config.response_length, config.prompt_length + config.response_length - prompt_len)
    wanted = [value for name in ("max_tokens", "max_new_tokens") if (value := params.pop(name, None)) is not None]
    num = wanted[0] if wanted else usual
    if config.max_model_len is not None:
        num = min(num, config.max_model_len - prompt_len)
    params["logprobs"] = 0 if params.pop("logprobs", False) else None
    params.setdefault("repetition_penalty", config.repetition_penalty)
    params.setdefault("ignore_eos", config.ignore_eos)
    return params | {"max_tokens": max(1, num), "detokenize": bool(params.get("stop"))}


def _uses_mtp(config: Any) -> bool:
    return config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout
