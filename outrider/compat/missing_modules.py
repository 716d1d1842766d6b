"""A table of the vLLM modules that do not exist here, each with what to use instead. `not_here` quotes it in import
errors.

A row counts for a module and all modules inside it. An import names the outermost missing module, so a row for an inner
module is used only if the outer module exists here. Modules of earlier versions of vLLM are at the end.
"""

from __future__ import annotations

from outrider.compat.settings import NO_IMAGES, ONE_DEVICE, ONE_GRAMMAR_LIBRARY

ADDING_PARTS = "docs/extending.md says how to add parts"
BENCHMARKS = "outrider.benchmarks.datasets has prompts, and `outrider bench` measures"
CONFIGS = "outrider.config has the classes, and llm.llm_engine.vllm_config the settings of an engine"
ENGINE = "LLM, LLMEngine and AsyncLLM of outrider are the engine; outrider.outputs has what they return"
KERNELS = "the engine chooses among its own kernels, and docs/extending.md says how to add one"
ONE_CACHE = "one engine keeps its own cache, and publishes what it holds with kv_events_config"
PARSERS = "`outrider serve` has --reasoning-parser and --tool-call-parser, and gives answers in their parts"
PROMPTS = "give prompts as outrider.inputs has them to LLM.generate, or messages to LLM.chat"
RANKS = f"the ranks of an engine find each other on one machine: {ONE_DEVICE}"
SERVER = "run `outrider serve`, or answer requests of a server of your own with AsyncLLM"
WEIGHTS = ("transformers' save_pretrained saves a model, the engine reads safetensors and GGUF files, "
           "LLM.update_weights replaces weights, and docs/extending.md says how to add a model")
WORKER = "an engine makes its own workers, and every method is one of LLM or AsyncLLM"

MISSING_MODULES = {
    "assets": NO_IMAGES,
    "benchmarks": BENCHMARKS,
    "collect_env": "run `outrider env`",
    "compilation": "steps are captured as CUDA graphs unless enforce_eager is set",
    "config": CONFIGS,
    "config.attention": "choose a backend with attention_backend",
    "config.kv_transfer": ONE_CACHE,
    "config.weight_transfer": "LLM.update_weights replaces weights",
    "connections": "files are read from the hub or from a folder, and prompts are texts or token ids",
    "cute_utils": KERNELS,
    "device_allocator": "LLM.sleep and LLM.wake_up give an engine's memory back and take it again",
    "distributed": RANKS,
    "distributed.device_communicators": "replace weights with LLM.update_weights, which takes tensors",
    "distributed.ec_transfer": NO_IMAGES,
    "distributed.kv_events": "kv_events_config publishes events of the cache: docs/replicas.md says how",
    "distributed.kv_transfer": ONE_CACHE,
    "distributed.weight_transfer": "LLM.update_weights replaces weights by tensors or by a folder's",
    "engine": ENGINE,
    "entrypoints": SERVER,
    "entrypoints.cli": "the command is `outrider`",
    "entrypoints.chat_utils": "give messages to LLM.chat, and a template's text as its chat_template",
    "env_override": "settings are arguments of LLM and flags of the commands",
    "exceptions": "a request that cannot be served raises ValueError, and an argument that is not there TypeError",
    "forward_context": "layers get a context of their own: docs/extending.md says how to add one",
    "inputs": "outrider.inputs itself has TextPrompt, TokensPrompt, EmbedsPrompt and PromptType",
    "ir": KERNELS,
    "kernels": KERNELS,
    "logging_utils": "use logging.getLogger('outrider')",
    "logits_process": "docs/guide.md says how logits processors are written: logits_processors=[Class]",
    "lora": "give a LoRARequest of outrider.lora.request with the prompts; docs/adapters.md says more",
    "model_executor": WEIGHTS,
    "model_inspection": "`outrider env MODEL` says how a model is run",
    "models": WEIGHTS,
    "multimodal": NO_IMAGES,
    "parser": PARSERS,
    "platforms": "choose a device with device=",
    "plugins": ADDING_PARTS,
    "profiler": "LLM.start_profile and LLM.stop_profile record with torch's profiler, to profiler_dir",
    "ray": "`outrider serve --ray` runs replicas on a Ray cluster",
    "reasoning": PARSERS,
    "renderers": PROMPTS,
    "scalar_type": "weights keep the format of the model's files: docs/formats.md names the formats",
    "snapshot": "an engine starts anew; LLM.sleep gives its memory back until LLM.wake_up",
    "tasks": "use PoolingParams(task=...), or LLM.embed, classify, score and encode",
    "third_party": "install the library itself",
    "tilelang_utils": KERNELS,
    "tokenizers": "LLM.get_tokenizer gives the tokenizer",
    "tool_parsers": PARSERS,
    "tracing": "the server has --otlp-traces-endpoint",
    "transformers_utils": "LLM.get_tokenizer gives the tokenizer, and llm.model_config.hf_config the values of "
                          "config.json",
    "triton_utils": "import triton itself",
    "usage": "no statistics of use are collected",
    "utils": "outrider.utils has FlexibleArgumentParser and random_uuid, and outrider.utils.network_utils has ports",
    "utils.torch_utils": "getattr(torch, name) gives the type of a name, seed= seeds an engine, and torch has the rest",
    "v1": ENGINE,
    "v1.attention": KERNELS,
    "v1.executor": WORKER,
    "v1.kv_offload": ONE_CACHE,
    "v1.metrics": "LLM.get_metrics has the metrics, outrider.v1.metrics.reader their kinds, and the server /metrics",
    "v1.sample": "outrider.v1.sample.logits_processor has LogitsProcessor; docs/extending.md says how to add parts",
    "v1.simple_kv_offload": ONE_CACHE,
    "v1.spec_decode": "speculative_config chooses a drafter, and docs/drafters.md says how to add one",
    "v1.structured_output": ONE_GRAMMAR_LIBRARY,
    "v1.worker": WORKER,
    "vllm_flash_attn": KERNELS,
    # earlier versions
    "adapter_commons": "give lora_request with the prompts",
    "attention": KERNELS,
    "beam_search": "LLM.beam_search, with BeamSearchParams of outrider",
    "core": ENGINE,
    "executor": WORKER,
    "jsontree": PROMPTS,
    "prompt_adapter": "prompt adapters are not served: give lora_request",
    "spec_decode": "speculative_config chooses a drafter, and docs/drafters.md says how to add one",
    "worker": WORKER,
    "model_hooks": ADDING_PARTS,
}


def instead_of(module: str) -> str | None:
    """The advice for a module, by its name without the package; None if vLLM has no such module."""
    parts = module.split(".")
    ends = range(len(parts), 0, -1)
    private = KERNELS if parts[0].startswith("_") else None  # vllm._C, vllm._custom_ops
    return next((MISSING_MODULES[name] for end in ends if (name := ".".join(parts[:end])) in MISSING_MODULES), private)
