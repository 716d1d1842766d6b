"""A table of vLLM's settings that have another name here, or do not exist here, each with its effect or a replacement.
No torch.

`translate` converts the settings of a script written for vLLM to Outrider's. A setting that asks for something that
does not exist here is refused by name. A setting without effect is explained in one line of the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from outrider.core.fields import shown, unknown_name
from outrider.core.lazy_exports import LateModule

if TYPE_CHECKING:
    from outrider.compat import pooler_config, profiler_config
else:
    pooler_config = LateModule("outrider.compat.pooler_config")
    profiler_config = LateModule("outrider.compat.profiler_config")

log = logging.getLogger("outrider")


@dataclass(frozen=True)
class SameAs:
    """A setting of vLLM that has another name here."""

    name: str
    is_switch: bool = False  # on the command line it has no value


@dataclass(frozen=True)
class Explained:
    """A setting that is accepted without effect; `words` say why."""

    words: str
    is_switch: bool = False


@dataclass(frozen=True)
class Refused:
    """A setting of vLLM that Outrider does not have. Its `neutral` values ask for nothing and are accepted."""

    instead: str
    neutral: tuple[Any, ...] = (None,)
    is_switch: bool = False


@dataclass(frozen=True)
class Checked:
    """A setting that is accepted only for values that ask for the behaviour that the engine has anyway. `refused` finds
    the part of a value that asks for more."""

    refused: Callable[[Any], str | None]
    is_switch: bool = False


Meaning: TypeAlias = SameAs | Explained | Refused | Checked

NO_IMAGES = "of the settings for images only limit_mm_per_prompt is supported: leave this one out"
BY_CONFIG = "a head that classifies is served where the model's config names one (*ForSequenceClassification)"
ONE_GRAMMAR_LIBRARY = "grammars are compiled by llguidance: leave it out"
ONE_DEVICE = "a model is cut by tensor_parallel_size alone: start an engine for each further copy"
OWN_CONFIG = "give its values as hf_overrides={'key': value}, or change config.json in a copy of the model's folder"
ALL_ON_DEVICE = "weights lie on one device: choose a smaller model or a quantised file"
OWN_FORMAT = "weights keep the format of the model's files: leave it out, or name a model in the format you want"

VLLM_SETTINGS: dict[str, Meaning] = {
    "async_scheduling": SameAs("overlap", is_switch=True),
    "block_size": SameAs("page_size"),
    "profiler_config": SameAs("profiler_dir"),
    "num_gpu_blocks_override": SameAs("num_pages"),
    "compilation_config": Explained("steps are captured as CUDA graphs unless enforce_eager is set"),
    "disable_custom_all_reduce": Explained("sums over ranks are chosen by the engine", is_switch=True),
    "disable_log_requests": Explained("requests are not logged", is_switch=True),
    "disable_log_stats": Explained("speculation is logged at level INFO of the logger 'outrider'", is_switch=True),
    "enable_chunked_prefill": Explained("long prompts are always computed in chunks of max_num_batched_tokens",
                                        is_switch=True),
    "enable_prompt_embeds": Explained("prompts may always be embeddings", is_switch=True),
    "max_seq_len_to_capture": Explained("captured steps serve every length up to max_model_len"),
    "prefix_caching_hash_algo": Explained("pages are found by one hash, which covers all tokens before them"),
    "scheduling_policy": Explained("requests are served by priority, then by arrival"),
    "swap_space": Explained("pages are never swapped to the host: a preempted request is computed again"),
    "trust_remote_code": Explained("no remote code is ever run: model families are built in", is_switch=True),
    "use_v2_block_manager": Explained("there is only one page manager", is_switch=True),
    "allowed_local_media_path": Refused("it is a setting of the server: outrider serve --allowed-local-media-path",
                                        (None, "")),
    "calculate_kv_scales": Refused("scales of an fp8 cache come from the model's files, or are 1",
                                   (None, False), is_switch=True),
    "convert": Refused(BY_CONFIG, (None, "auto", "none", "embed", "classify")),
    "cpu_offload_gb": Refused(ALL_ON_DEVICE, (None, 0)),
    "config_format": Explained("config.json is read, or a GGUF file's metadata"),
    "data_parallel_size": Refused("replicas are an option of the server: outrider serve --replicas N", (None, 1)),
    "disable_cascade_attn": Refused("cascade attention does not exist here: leave it out",
                                    (None, True), is_switch=True),
    "disable_sliding_window": Refused("a model's sliding windows cannot be switched off: leave it out",
                                      (None, False), is_switch=True),
    "distributed_executor_backend": Refused("ranks are processes that each node starts (nnodes); replicas run on "
                                            "a Ray cluster with outrider serve --ray", (None, "mp", "uni")),
    "enable_expert_parallel": Refused(ONE_DEVICE, (None, False), is_switch=True),
    "enable_sleep_mode": Explained("every engine can sleep", is_switch=True),
    "generation_config": Refused("the model's generation_config is not read: pass sampling parameters", (None, "vllm")),
    "guided_decoding_backend": Explained("grammars are compiled by llguidance"),
    "hf_token": Refused("set HF_TOKEN in the environment, or log in with `hf auth login`"),
    "kv_transfer_config": Refused("engines do not exchange KV caches: leave it out"),
    "mm_processor_kwargs": Refused(NO_IMAGES, (None, {})),
    "num_speculative_tokens": Refused("use speculative_config={'method': ..., 'num_speculative_tokens': ...}"),
    "override_generation_config": Refused("pass sampling parameters with the request", (None, {})),
    "pipeline_parallel_size": Refused(ONE_DEVICE, (None, 1)),
    "preemption_mode": Refused("a preempted request is always recomputed: leave it out", (None, "recompute")),
    "reasoning_parser": Refused("it is a setting of the server: outrider serve --reasoning-parser", (None, "")),
    "rope_scaling": Refused("use hf_overrides={'rope_scaling': ...}", (None, {})),
    "rope_theta": Refused("use hf_overrides={'rope_theta': ...}"),
    "override_pooler_config": Checked(lambda given: pooler_config.pooling_refused(given)),
    "pooler_config": Checked(lambda given: pooler_config.pooling_refused(given)),
    "runner": Refused(BY_CONFIG, (None, "auto", "generate", "pooling")),
    "served_model_name": Refused("it is a setting of the server: outrider serve --served-model-name"),
    "speculative_model": Refused("use speculative_config={'method': ..., 'model': ...}"),
    "structured_outputs_config": Checked(lambda given: None if not given or (
        isinstance(given, dict) and given.keys() <= {"backend"}) else ONE_GRAMMAR_LIBRARY),
    "task": Refused(BY_CONFIG, (None, "auto", "generate", "embed", "embedding", "classify", "score", "reward")),
    "tool_call_parser": Refused("it is a setting of the server: outrider serve --tool-call-parser", (None, "")),
    "tokenizer_mode": Explained("tokenizer.json is read, or a GGUF file's own"),
    "tokenizer_revision": Refused("model and tokenizer have one revision: use revision"),
    "worker_cls": Refused("the worker class cannot be replaced: leave it out", (None, "auto")),
    "additional_config": Refused("additional settings do not exist: leave it out", (None, {})),
    "allowed_media_domains": Refused("it is a setting of the server: outrider serve --allowed-media-domains"),
    "attention_config": Refused("use attention_backend to choose a backend"),
    "code_revision": Explained("no remote code is ever run: model families are built in"),
    "cudagraph_capture_sizes": Explained("sizes of captured steps are chosen by the engine"),
    "cuda_graph_sizes": Explained("sizes of captured steps are chosen by the engine"),
    "data_parallel_backend": Refused(ONE_DEVICE, (None, "mp")),
    "decode_context_parallel_size": Refused(ONE_DEVICE, (None, 1)),
    "disable_chunked_mm_input": Explained(NO_IMAGES, is_switch=True),
    "disable_hybrid_kv_cache_manager": Explained("there is only one page manager", is_switch=True),
    "enable_dbo": Refused(ONE_DEVICE, (None, False), is_switch=True),
    "enable_eplb": Refused(ONE_DEVICE, (None, False), is_switch=True),
    "enable_lora_bias": Refused("biases of adapters are not supported: leave it out", (None, False), is_switch=True),
    "fully_sharded_loras": Explained("the factors of adapters are cut as their weights are", is_switch=True),
    "hf_config_path": Refused(OWN_CONFIG),
    "ignore_patterns": Explained("only the files that a model needs are fetched"),
    "kv_sharing_fast_prefill": Refused("layers that share a cache have no faster prefill: leave it out", (None, False),
                                       is_switch=True),
    "long_prefill_token_threshold": Explained("long prompts are always computed in chunks of max_num_batched_tokens"),
    "lora_dtype": Refused("adapters always have the model's dtype: leave it out", (None, "auto")),
    "mamba_block_size": Refused("use checkpoint_interval: tokens between the states that are kept for prefix hits"),
    "mamba_cache_mode": Explained("states of recurrent layers are kept for prefix hits every checkpoint_interval "
                                  "tokens, unless enable_prefix_caching is False"),
    "mamba_cache_dtype": Refused("states of recurrent layers are always float32", (None, "auto", "float32")),
    "mamba_ssm_cache_dtype": Refused("states of recurrent layers are always float32", (None, "auto", "float32")),
    "max_long_partial_prefills": Explained("prompts share a step's tokens in the order of their arrival"),
    "max_num_partial_prefills": Explained("prompts share a step's tokens in the order of their arrival"),
    "max_parallel_loading_workers": Explained("weights are read by one process"),
    "media_io_kwargs": Refused(NO_IMAGES, (None, {})),
    "mm_encoder_tp_mode": Refused(NO_IMAGES, (None, "weights")),
    "mm_processor_cache_gb": Explained("the features of the latest images are always kept"),
    "model_loader_extra_config": Refused("weight loading has no further settings: leave it out", (None, {})),
    "observability_config": Refused("the server has /metrics and --otlp-traces-endpoint"),
    "prefill_context_parallel_size": Refused(ONE_DEVICE, (None, 1)),
    "safetensors_load_strategy": Explained("tensors are read one at a time"),
    "scheduler_cls": Refused("the scheduler class cannot be replaced: leave it out"),
    "skip_mm_profiling": Refused(NO_IMAGES, (None, False), is_switch=True),
    "stream_interval": Explained("a stream sends all tokens that are ready at each step"),
    "use_tqdm_on_load": Explained("progress bars are shown on a terminal only", is_switch=True),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_size_local", "data_parallel_address", "device_ids",
                     "eplb_config", "numa_bind_nodes", "numa_bind_cpus"),
                    Refused(ONE_DEVICE, (None, 0, 1))),
    **dict.fromkeys(("enable_elastic_ep", "data_parallel_hybrid_lb", "data_parallel_external_lb", "worker_use_ray",
                     "ray_workers_use_nsight", "numa_bind"), Refused(ONE_DEVICE, (None, False), is_switch=True)),
    **dict.fromkeys(("all2all_backend", "gdn_prefill_backend", "kernel_config", "linear_backend", "mamba_backend",
                     "max_cudagraph_capture_size", "max_context_len_to_capture", "moe_backend", "optimization_level",
                     "performance_mode"), Explained("the engine chooses its kernels and captured steps")),
    **dict.fromkeys(("disable_async_output_proc", "enable_flashinfer_autotune", "enable_cumem_allocator",
                     "multi_step_stream_outputs", "use_fp64_gumbel"),
                    Explained("steps run in one way only", is_switch=True)),
    **dict.fromkeys(("num_scheduler_steps", "num_lookahead_slots", "scheduler_delay_factor", "tokenizer_pool_size"),
                    Explained("steps are scheduled one by one, and overlap")),
    **dict.fromkeys(("collect_detailed_traces", "show_hidden_metrics_for_version", "otlp_traces_endpoint"),
                    Refused("the server has /metrics and --otlp-traces-endpoint")),
    **dict.fromkeys(("cudagraph_metrics", "enable_logging_iteration_details", "enable_mfu_metrics", "kv_cache_metrics"),
                    Refused("outputs have metrics of their requests, and llm.get_metrics() those of the engine",
                            (None, False), is_switch=True)),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"),
                    Refused("use speculative_config={'method': ..., 'num_speculative_tokens': ...}")),
    **dict.fromkeys(("ec_transfer_config", "kv_offloading_backend", "kv_offloading_size"),
                    Refused("engines do not exchange KV caches: leave it out")),
    "language_model_only": Explained(NO_IMAGES, is_switch=True),
    "enable_mm_embeds": Refused(NO_IMAGES, (None, False), is_switch=True),
    "quantization_config": Refused(OWN_FORMAT),
}

# Settings that vLLM has since 0.26.
VLLM_SETTINGS |= {
    "allow_deprecated_quantization": Explained(OWN_FORMAT, is_switch=True),
    "cpu_offload_params": Refused(ALL_ON_DEVICE, (None, (), [], set())),
    "default_mm_loras": Refused(NO_IMAGES, (None, {})),
    "diffusion_config": Refused("diffusion language models are not supported"),
    "enable_log_requests": Explained("requests are not logged", is_switch=True),
    "enable_mamba_cache_stochastic_rounding": Refused("states of recurrent layers are always float32", (None, False),
                                                      is_switch=True),
    "enable_moe_shared_loras": Refused("adapters of experts must have PEFT's format: leave it out", (None, False),
                                         is_switch=True),
    "enable_tower_connector_lora": Refused(NO_IMAGES, (None, False), is_switch=True),
    "enable_trace_replay": Refused("answers cannot be replayed: give known tokens as part of the prompt",
                                   (None, False), is_switch=True),
    "engram_config": Refused("tables of n-gram embeddings cannot be placed elsewhere: leave it out"),
    "io_processor_plugin": Refused("plugins for prompts are not supported: give texts, token ids or images",
                                   (None, "")),
    "lora_target_modules": Explained("an adapter's own config names its layers"),
    "max_lora_cls_labels": Refused("adapters of classification heads are not supported: leave it out"),
    "max_num_active_seqs": Refused("use max_num_seqs"),
    "max_num_scheduled_tokens": Refused("use max_num_batched_tokens"),
    "model_class_overrides": Refused("docs/extending.md says how to add a model", (None, {})),
    "model_weights": Refused("give the folder or the file with the weights as model", (None, "")),
    "per_request_spec_decode_metrics": Refused("read the counts of drafts in the outputs' metrics", (None, "none")),
    "prefill_schedule_interval": Explained("every step may compute prompts"),
    "prefix_cache_retention_interval": Explained("pages and states are cached until their memory is needed"),
    "prefix_match_unit": Explained("prefixes are found by whole pages"),
    "pt_load_map_location": Explained("weights are read from safetensors or GGUF files"),
    "reasoning_config": Refused("the length of reasoning is not bounded: use max_tokens", (None, {})),
    "reasoning_parser_plugin": Refused("parsers are built in: use --reasoning-parser of the server", (None, "")),
    "scheduler_reserve_full_isl": Explained("a request is admitted as soon as its next step has room", is_switch=True),
    "sleep_mode_backend": Explained("every engine can sleep"),
    "sleep_mode_offload_cudagraph": Explained("captured steps are dropped, and captured again", is_switch=True),
    "sleep_preserve_parameter_names": Refused("LLM.sleep(level=1) keeps all weights in the host's memory",
                                              (None, (), [])),
    "specialize_active_lora": Explained("captured steps serve any number of adapters", is_switch=True),
    "tokens_only": Refused("give token ids, and skip_tokenizer_init=True", (None, False), is_switch=True),
    "watermark": Explained("a preempted request is computed again"),
    "watermark_config": Refused("watermarks are not supported: leave it out"),
    "weight_transfer_config": Refused("use LLM.load_weights, or outrider serve --weight-transfer-config"),
    **dict.fromkeys(("aux_output_config", "ec_manager_config", "video_pruning_rate", "video_pruning_method"),
                    Refused(NO_IMAGES, (None, {}, "evs"))),
    **dict.fromkeys(("interleave_mm_strings", "mm_encoder_only"), Refused(NO_IMAGES, (None, False), is_switch=True)),
    **dict.fromkeys(("mm_device_do_normalize", "mm_encoder_attn_backend", "mm_encoder_attn_dtype",
                     "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path",
                     "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_cache_type", "mm_processor_device",
                     "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc"), Explained(NO_IMAGES)),
    **dict.fromkeys(("cp_kv_cache_interleave_size", "data_parallel_rpc_port", "data_parallel_start_rank",
                     "dcp_comm_backend", "dcp_kv_cache_interleave_size", "elastic_ep_max_dp_size"),
                    Refused(ONE_DEVICE, (None, 0, 1, 64, "ag_rs"))),
    **dict.fromkeys(("data_parallel_multi_port_external_lb", "dcp_q_replicate", "enable_batch_sharded_sampling",
                     "enable_ep_weight_filter", "enable_hc_sp"), Refused(ONE_DEVICE, (None, False), is_switch=True)),
    **dict.fromkeys(("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "dp_sync_interval",
                     "expert_placement_strategy", "renderer_num_workers", "ubatch_size"), Explained(ONE_DEVICE)),
    **dict.fromkeys(("disable_nccl_for_dp_synchronization", "enable_nccl_comm_suspend", "enable_shm_tensor_arena"),
                    Explained("ranks exchange tensors in one way, chosen by the engine", is_switch=True)),
    **dict.fromkeys(("cpu_distributed_timeout_seconds", "distributed_timeout_seconds", "fault_tolerance_config",
                     "shutdown_timeout", "watchdog_config"),
                    Explained("if a rank dies or hangs, the engine ends with an error that names it")),
    "enable_fault_tolerance": Refused("the server always restarts a dead engine: leave it out",
                                      (None, False), is_switch=True),
    **dict.fromkeys(("ir_op_priority", "kda_decode_backend", "kda_prefill_backend", "mamba_cache_philox_rounds",
                     "mamba_config", "mamba_ssu_algorithm", "replayssm_buffer_len", "sparse_indexer_topk_backend"),
                    Explained("the engine chooses its kernels and captured steps")),
    **dict.fromkeys(("enable_mixed_moe_lora_format", "long_prefill_token_threshold_adaptive", "monokernel",
                     "enable_mamba_shared_prefix_checkpoint", "swa_bounded_replay", "use_replayssm"),
                    Explained("steps run in one way only", is_switch=True)),
    **dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"),
                    Refused("it is a setting of the server: outrider serve --max-num-queued-reqs")),
    **dict.fromkeys(("offload_backend", "offload_group_size", "offload_num_in_group", "offload_params",
                     "offload_prefetch_step"), Refused(ALL_ON_DEVICE, (None, "auto", 0, 1, (), [], set()))),
    **dict.fromkeys(("aggregate_engine_logging", "enable_layerwise_nvtx_tracing", "enable_mm_processor_stats",
                     "fail_on_environ_validation", "jit_monitor_verbose"),
                    Explained("use logging.getLogger('outrider'), and profiler_dir for times", is_switch=True)),
    **dict.fromkeys(("custom_histogram_buckets", "jit_monitor_mode", "kv_cache_metrics_sample", "log_config_file",
                     "log_level", "logging_config"), Explained("use logging.getLogger('outrider')")),
    **dict.fromkeys(("safetensors_prefetch_block_size", "safetensors_prefetch_num_threads"),
                    Explained("tensors are read one at a time")),
}

DRAFTER_RANKS = "draft_tensor_parallel_size"  # a drafter runs on the ranks of its target
DRAFTING_KEYS: dict[str, Meaning] = {
    "disable_by_batch_size": Explained("the number of drafts is chosen every step, down to none"),
    "disable_logprobs": Explained("log-probabilities are those of the model"),
    "disable_padded_drafter_batch": Explained("batches have one form with drafts and without"),
    "enforce_eager": Refused("use the engine's setting enforce_eager", (None, False)),
    "max_model_len": Refused("a drafter has the max_model_len of its target: leave it out"),
    "quantization": Refused(OWN_FORMAT),
    "use_heterogeneous_vocab": Refused("a drafter must have its target's vocabulary: leave it out", (None, False)),
    "synthetic_acceptance_rates": Refused("use synthetic_rates"),
    "draft_lm_head_quantization": Refused("the engine makes an 8-bit copy of the output itself where that is faster"),
    "num_speculative_tokens_per_batch_size": Explained("the number of drafts is chosen every step, down to none"),
    "enable_adaptive_verification": Explained("the number of drafts is chosen every step, down to none"),
    **dict.fromkeys(("attention_backend", "moe_backend"), Explained("a drafter has the kernels of its target")),
    "kv_cache_dtype": Refused("a drafter's cache has its target's dtype: leave it out", (None, "auto")),
    **dict.fromkeys(("disable_eagle_block_drop", "disable_lookahead_block_hashes", "use_local_argmax_reduction"),
                    Explained("drafting has one implementation only")),
    "draft_sample_method": Explained("drafts never change the distribution of the output"),
    "index_share_for_mtp_iteration": Explained("a module chooses its own tokens to attend to"),
    "parallel_drafting": Refused("the method decides this (block drafters draft in parallel): leave it out",
                                 (None, False)),
    "draft_load_config": Refused("loading a drafter has no further settings: leave it out"),
    "code_revision": Explained("no remote code is ever run: drafters are built in"),
    **dict.fromkeys(("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
                     "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
                    Explained("suffix drafts have sizes of their own: see docs/drafters.md")),
    **dict.fromkeys(("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
                    Refused("inexact acceptance of drafts is not supported: leave it out")),
    "dspark_draft_topk": Refused("a DSpark drafter always drafts its likeliest token: leave it out"),
    "xpress_topc": Refused("XPress drafters are not supported"),
    "revision": Refused("give the folder of that revision as model"),
}
# Values that ask for nothing where the model is on one rank: a script is its one process then.
AT_ONE_RANK: dict[str, tuple[Any, ...]] = {"distributed_executor_backend": ("external_launcher",)}
# Methods of drafting that have another name here, and those that are not here.
METHOD_NAMES = {"ngram_gpu": "ngram"}
OTHER_METHODS = {
    "custom_class": "give the class as 'package.module:Class'",
    "extract_hidden_states": "LLM.encode gives hidden states",
    "medusa": "heads of this kind are not served: train an EAGLE-3 head or a block drafter (docs/training.md)",
    "mlp_speculator": "speculators of this kind are not served: train an EAGLE-3 head or a block drafter "
                      "(docs/training.md)",
}
OTHER_METHODS["mlpspeculator"] = OTHER_METHODS["mlp_speculator"]
# Own settings that scripts for vLLM may give as None.
NONE_IS_DEFAULT = ("enable_lora", "enable_prefix_caching", "kv_cache_dtype", "logits_processors")

# Values that are called something else here, by the setting they belong to.
VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "logprobs_mode": {"raw_logprobs": "raw", "processed_logprobs": "processed"},
    "model_impl": {"vllm": "outrider"},
    "load_format": {"safetensors": "auto", "gguf": "auto", "mistral": "auto", "hf": "auto"},
    "attention_backend": {"FLEX_ATTENTION": "flex", "TORCH_SDPA": "torch", "TRITON_ATTN": "triton",
                          "TRITON_ATTN_VLLM_V1": "triton", "TRITON_MLA": "triton"},
}
# Attention backends of vLLM that have no counterpart: the engine chooses.
OTHER_BACKENDS = ("CUTLASS_MLA", "FLASHINFER", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN", "FLASH_ATTN_MLA",
                  "FLASH_ATTN_VLLM_V1", "XFORMERS")


def translate(front: str, given: dict[str, Any], known: Iterable[str],
              table: Mapping[str, Meaning] = VLLM_SETTINGS) -> dict[str, Any]:
    """Convert vLLM's settings to their names here. `front`: the class or command with which error messages begin;
    `known`: the names of Outrider's settings; `table`: vLLM's settings."""
    settings: dict[str, Any] = {}
    num_ranks = given.get("tensor_parallel_size", 1)
    for name, value in given.items():
        match table.get(name):
            case SameAs(own):
                if value is not None and given.get(own) is not None:
                    raise ValueError(f"{front}: {name} and {own} say the same thing: give one of them")
                if value is not None:
                    settings[own] = _value(name, value)
            case Explained(words):
                if value is not None:
                    log.warning("%s=%s has no effect: %s", name, shown(value), words)
            case Refused(instead, neutral):
                neutral += () if num_ranks != 1 else AT_ONE_RANK.get(name, ())
                if not any(type(value) is type(same) and value == same for same in neutral):
                    raise ValueError(f"{front}: {name}={shown(value)} is not supported: {instead}")
            case Checked(refused):
                if (reason := refused(value)) is not None:
                    raise ValueError(f"{front}: {name}: {reason}")
            case None if name not in known:
                raise ValueError(f"{front}: {unknown_name('setting', name, known, table)}")
            case None if value is None and (name in NONE_IS_DEFAULT or name in settings):
                pass
            case None if name == "speculative_config" and isinstance(value, dict):
                settings[name] = translate_drafting(value, num_ranks)
            case None:
                settings[name] = _value(name, value)
    return settings


def translate_drafting(given: dict[str, Any], num_ranks: int = 1) -> dict[str, Any]:
    """Convert vLLM's speculative_config to the names here. num_ranks: the number of the target's ranks."""
    own: dict[str, Any] = {}
    for key, value in given.items():
        meaning = Refused(ONE_DEVICE, (None, num_ranks)) if key == DRAFTER_RANKS else DRAFTING_KEYS.get(key)
        match meaning:
            case Explained(words):
                if value is not None:
                    log.warning("speculative_config: %s=%s has no effect: %s", key, shown(value), words)
            case Refused(instead, neutral):
                if value not in neutral:
                    raise ValueError(f"speculative_config: {key}={shown(value)} is not supported: {instead}")
            case _:
                own[key] = value
    model, method = own.get("model"), own.get("method")
    if isinstance(method, str) and method in OTHER_METHODS:
        raise ValueError(f"speculative_config: method {method!r} is not supported: {OTHER_METHODS[method]}")
    if model in ("ngram", "[ngram]"):
        own |= {"model": None, "method": "ngram"}
    elif isinstance(method, str):
        own["method"] = "mtp" if method.endswith("_mtp") else METHOD_NAMES.get(method, method)
    return own


def _value(setting: str, value: Any) -> Any:
    if setting == "dtype" and type(value).__module__ == "torch":  # torch.float16 itself
        value = str(value).removeprefix("torch.")
    if setting == "attention_backend" and value in OTHER_BACKENDS:
        log.warning("attention_backend=%s has no effect: the engine chooses among its own kernels", shown(value))
        return "auto"
    if setting == "profiler_config":
        return profiler_config.profiler_dir(value)
    return VALUES.get(setting, {}).get(value, value) if isinstance(value, str) else value
