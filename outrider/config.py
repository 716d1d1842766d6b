"""EngineConfig: a frozen dataclass with every setting of an engine and its default.

Sizes that the caller leaves as None are chosen here, by the model and the device. The value "auto" is replaced later,
where the worker starts: of a device, dtype or backend in `runner/device.py` and `mixers/paged/registry.py`, of a
drafting method in `drafters/files.py`, which reads the drafter's files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from outrider.core import PAGE_TOKENS, Limits
from outrider.core.fields import INT32, INT64, Count, NotEmpty, OneOf, Range, Text, check_fields, unknown_name
from outrider.core.lazy_exports import LateModule
from outrider.core.params import Seed
from outrider.core.shipped_drafters import SHIPPED, ShippedDrafter

if TYPE_CHECKING:
    from outrider import logits_processors as processors
    from outrider.core import media_limits
else:
    processors = LateModule("outrider.logits_processors")
    media_limits = LateModule("outrider.core.media_limits")

__path__: list[str] = []  # vLLM has a package of this name: imports of its modules say what to use (compat/not_here.py)
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DTYPES_MEANT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
LOAD_FORMATS = ("auto", "dummy")
MODEL_IMPLS = ("auto", "outrider", "transformers")
BACKENDS = ["auto", "torch", "native", "cpu", "triton", "flex"]  # `cpu` is native; registering a backend adds its name
# Registering a cache type adds its name.
CACHE_TYPES = ["auto", "float32", "bfloat16", "float16", "float64", "fp8", "fp8_e4m3"]
AUTO_DRAFTER = "auto"  # of speculative_config: the drafter that comes with the model
SLIDING = "sliding_window"  # all layers with a window
SkippedLayer = Annotated[str, OneOf((SLIDING,), r"\d{1,6}", "the number of a layer")]
LOGPROBS_MODES = ("raw", "processed")
QUANTIZATIONS = ("fp8", "int4")
# Names that vLLM gives the forms of quantised files, with their quant_method: the files must be of that form.
FILE_FORMS = {
    "awq": "awq", "awq_marlin": "awq", "auto_awq": "awq", "gptq": "gptq", "gptq_marlin": "gptq", "auto_gptq": "gptq",
    "compressed-tensors": "compressed-tensors", "fbgemm_fp8": "fbgemm_fp8", "modelopt": "modelopt",
    "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "modelopt_mxfp8": "modelopt", "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4", "gguf": "gguf",
}
INDEX_KEY_DTYPES = ("auto", "fp8")
MAX_REQUESTS = 1 << 16  # in one step: far beyond what a device serves, and rows of so many still fit in memory
STREAM_STEP_MS = 12.0  # default of max_step_ms where tokens are streamed; without it prompts are computed faster
MAX_PADDING = 16  # the most that a batch may be padded by, as a factor
LARGE_GPU_BYTES = 64 << 30  # total memory of a GPU that serves twice as many requests at once by default
CPU_CACHE_BYTES = 4 << 30  # at most this much for the pool on the CPU
ADAPT_MEMORY_BYTES = 256 << 20  # default of adapt_memory_bytes
CPU_CACHE_SHARE = 0.25  # share of the free memory that a cache on a CPU may take
Quantization: TypeAlias = Annotated[str, OneOf(QUANTIZATIONS, "|".join(FILE_FORMS))]


@dataclass(frozen=True)
class EngineConfig:
    model: Text
    tokenizer: Text | None = None  # a folder, a GGUF file or a hub id, instead of the model's own
    revision: Text | None = None  # a branch, a tag or a commit of a hub id
    download_dir: Text | None = None  # where files from the hub are kept, instead of its own cache folder
    dtype: Annotated[str, OneOf(DTYPES, meant=DTYPES_MEANT)] = "auto"
    device: Annotated[str, OneOf(DEVICES, r"cuda:\d{1,3}", "cuda:N", {"gpu": "cuda"})] = "auto"
    tensor_parallel_size: Annotated[int, Range(1, 64)] = 1  # ranks that hold the model together, each in a process
    nnodes: Annotated[int, Range(1, 64)] = 1  # machines that share the ranks evenly
    node_rank: Annotated[int, Range(0, 63)] = 0  # this machine's number; node 0 has the engine
    master_addr: Text = "127.0.0.1"  # of node 0, at which it waits for the others
    master_port: Annotated[int, Range(1, 65535)] = 29501
    max_model_len: Count | None = None  # the model's own, lowered to what the pool can hold
    max_num_seqs: Annotated[int, Range(1, MAX_REQUESTS)] | None = None
    max_num_batched_tokens: Count | None = None
    max_step_ms: Annotated[float, Range(0.1, 1e6)] | None = None  # CUDA: of steps with prompts, while requests decode
    page_size: Annotated[int, OneOf(PAGE_TOKENS)] = 16  # smallest page, in tokens
    num_pages: Count | None = None  # instead of a size in bytes
    kv_cache_memory_bytes: Annotated[int, Range(1, INT64)] | None = None
    gpu_memory_utilization: Annotated[float, Range(0.01, 1)] = 0.9
    kv_cache_dtype: Annotated[str, OneOf(CACHE_TYPES)] = "auto"  # keys and values: the model's dtype, or a cache type
    kv_cache_dtype_skip_layers: tuple[SkippedLayer, ...] = ()  # layers that keep the model's dtype
    enable_prefix_caching: bool = True
    checkpoint_interval: Count = 1024  # tokens between the states of recurrent layers that are kept for prefix hits
    overlap: bool | None = None  # schedule the next step before the last one's result is read
    seed: Seed = 0
    load_format: Annotated[str, OneOf(LOAD_FORMATS)] = "auto"
    # Whose code computes the model: a family of this package, or transformers' own. auto: a family where there is one.
    model_impl: Annotated[str, OneOf(MODEL_IMPLS)] = "auto"
    attention_backend: Annotated[str, OneOf(BACKENDS)] = "auto"
    enforce_eager: bool = False  # CUDA: no graphs
    logprobs_mode: Annotated[str, OneOf(LOGPROBS_MODES)] = "raw"
    max_logprobs: Annotated[int, Range(0, INT32, also=(-1,))] = 20  # -1: as many as the vocabulary has
    pad_requests: tuple[Count, ...] = ()  # batches are padded up to the next of these sizes
    pad_tokens: tuple[Count, ...] = ()
    # Tokens are guessed by: a drafter of these settings; "auto": the one that comes with the model, if there is one
    # (core/shipped_drafters.py); None: nothing.
    speculative_config: dict[str, Any] | Annotated[str, OneOf((AUTO_DRAFTER,))] | None = None
    adapt_drafter: bool = False  # an EAGLE-3 head learns from the traffic while it serves; in memory only
    adapt_memory_bytes: Annotated[int, Range(1, INT64)] = ADAPT_MEMORY_BYTES  # of served texts that it learns from
    adapt_share: Annotated[float, Range(0.001, 1)] = 0.03  # share of the time that its trainer works while requests run
    exact: bool = False  # a request's logits have the same bits alone and in any batch, with drafts and without
    # Settings of memory that were not given are chosen when the engine starts, by the memory there is. max_model_len,
    # if it is one of them, may be lowered again when steps were measured.
    fit: bool = False
    packed_weights: bool = True  # CPU: a second copy of the weights, laid out for a few token rows
    keep_quantized: bool = True  # weights stay in the bits of their files where a product reads these; same results
    quantization: Quantization | None = None  # fp8, int4: codes products at load; awq, gptq ...: the form of the files
    activation_bits: Annotated[int, OneOf((8, 16, 32))] = 16  # CPU, weights in 2 to 8 bits: 8 is faster, 32 as float32
    index_key_dtype: Annotated[str, OneOf(INDEX_KEY_DTYPES)] = "auto"  # indexers' keys: the model's dtype, or fp8
    ignore_config_keys: tuple[Text, ...] = ()  # keys of config.json that count as absent: harmless ones, unknown here
    hf_overrides: dict[str, Any] | None = None  # values of config.json that are replaced or added
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    kv_events_config: dict[str, Any] | None = None  # tell others' routers what the prefix cache holds
    profiler_dir: Text | None = None  # the folder that stop_profile writes to
    worker_extension_cls: Text | None = None  # "package.module.Class", whose methods collective_rpc calls
    enable_lora: bool = False  # requests may name adapters
    max_loras: Annotated[int, Range(1, 4096)] = 8  # adapters on the device at once
    max_lora_rank: Annotated[int, Range(1, 4096)] = 16  # the largest rank that an adapter may have
    max_cpu_loras: Annotated[int, Range(1, INT32)] | None = None  # adapters in the host's memory; None: 4 * max_loras
    lora_memory_bytes: Annotated[int, Range(1, INT64)] | None = None  # of adapters on the device; None: by the above
    enable_return_routed_experts: bool = False  # every sample gets the experts that each layer chose for its tokens
    return_sampling_mask: bool = False  # every request whose filters drop tokens gets the ids that they kept
    receipt_key_file: Text | None = None  # the operator's key, which signs receipts
    limit_mm_per_prompt: dict[str, Any] | None = None  # {"image": most of one prompt}; 0: no vision tower is loaded
    host_cache_memory: Annotated[int, Range(0, INT64)] | None = None  # bytes of the host for pages of the cache
    disk_cache_dir: Text | None = None  # a folder for pages of the cache, which later engines find again
    disk_cache_size: Annotated[int, Range(1, INT64)] = 32 << 30  # the most bytes in that folder
    logits_processors: tuple[Any, ...] = ()  # classes that change logits, or their names as "package.module:Class"

    def __post_init__(self) -> None:
        check_fields("", self)
        if self.checkpoint_interval < self.page_size:
            raise ValueError(f"checkpoint_interval must be at least page_size ({self.page_size} tokens), got "
                             f"{self.checkpoint_interval}: states are saved only at the ends of pages")
        if self.node_rank >= self.nnodes or self.tensor_parallel_size % self.nnodes:
            raise ValueError(f"nnodes={self.nnodes} must be above node_rank ({self.node_rank}) and divide "
                             f"tensor_parallel_size ({self.tensor_parallel_size}): every node has equally many ranks")
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_pages and kv_cache_memory_bytes say the same thing: give one of them")
        if self.logits_processors:
            processors.load_processors(self.logits_processors)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras}): "
                             "every adapter on the device is kept in the host's memory too")
        if self.limit_mm_per_prompt is not None:
            media_limits.check_limits(self.limit_mm_per_prompt)
        if isinstance(self.speculative_config, dict):
            SpeculativeConfig.parse(self.speculative_config)
        if self.adapt_drafter:
            self._check_adapting()
        if self.kv_events_config is not None:
            KVEventsConfig.parse(self.kv_events_config)

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images, if the model supports images."""
        return self.limit_mm_per_prompt is None or media_limits.most_images(self.limit_mm_per_prompt) != 0

    def _check_adapting(self) -> None:
        """Raise ValueError if adapt_drafter is set and no drafter of this config can learn while it serves. Whether a
        draft head's files allow it is checked later, in the worker."""
        methods = self.draft_methods
        if not set(methods) & {AUTO_METHOD, "eagle3"}:
            named = " and ".join(map(repr, methods)) or "none"
            raise ValueError(f"adapt_drafter: only EAGLE-3 heads learn while they serve, and the drafter is {named}: "
                             "give a speculative_config with method 'eagle3' (`outrider train-drafter` trains a "
                             "head), or leave adapt_drafter out")
        if self.tensor_parallel_size > 1:
            raise ValueError("adapt_drafter: a drafter cannot learn while it serves with "
                             f"tensor_parallel_size={self.tensor_parallel_size}: use tensor_parallel_size=1, or leave "
                             "adapt_drafter out")

    def for_streams(self) -> EngineConfig:
        """Return the config of an engine that streams tokens: it limits the time of steps with prompts, so that they
        do not hold up running streams for long."""
        return self if self.max_step_ms is not None else replace(self, max_step_ms=STREAM_STEP_MS)

    def without_drafts(self) -> EngineConfig:
        return replace(self, speculative_config=None, adapt_drafter=False)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """Settings of the drafter that the user asked for or that comes with the model; None without speculation."""
        given = self.drafter_settings
        return None if given is None else SpeculativeConfig.parse(given)

    @property
    def draft_methods(self) -> tuple[str, ...]:
        """The drafting methods in use, one or several combined; empty without speculation."""
        return () if self.speculative is None else tuple(self.speculative.methods)

    @property
    def fits_cache_to_device(self) -> bool:
        """Whether the KV cache gets all device memory that is left. False if the settings give the cache's size."""
        return self.num_pages is None and self.kv_cache_memory_bytes is None

    @property
    def drafter_settings(self) -> dict[str, Any] | None:
        """The value of `speculative_config`. "auto" is replaced by the settings of the drafter that comes with the
        model, or by None if there is no usable one."""
        if isinstance(self.speculative_config, dict):
            return self.speculative_config
        drafter = self.shipped_drafter
        return None if drafter is None or self.shipped_drafter_obstacle else drafter.speculative_config

    @property
    def shipped_drafter(self) -> ShippedDrafter | None:
        """The drafter that comes with the model, if "auto" asks for it. It may still be unusable: see
        `shipped_drafter_obstacle`."""
        return SHIPPED.get(self.model) if self.speculative_config == AUTO_DRAFTER else None

    @property
    def shipped_drafter_obstacle(self) -> str:
        """The reason why the model's own drafter cannot be used with these settings; empty if it can. With "auto" the
        engine then runs without drafts instead of refusing to start."""
        drafter = self.shipped_drafter
        if drafter is not None and not drafter.is_there:
            return f"{drafter.folder} lacks its weights"
        if self.load_format == "dummy":
            return "drafts for random weights (load_format='dummy') are never right"
        if self.tensor_parallel_size > 1:
            return "each of several ranks holds a part of the model's output, whose rows the drafter uses"
        if self.hf_overrides:
            return "hf_overrides make another model of it"
        if self.model_impl == "transformers":
            return "it is for the model as this package computes it"
        return ""

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """The settings for publishing prefix cache events; None if no events are asked for."""
        config = None if self.kv_events_config is None else KVEventsConfig.parse(self.kv_events_config)
        return config if config is not None and config.is_on else None

    def steps_in_flight(self, on_cuda: bool) -> int:
        """Return the number of steps in flight at once: two by default. With drafts on a CPU it is one: waiting for a
        result costs nothing there, and the result tells how many drafts the next step must check."""
        overlap = self.overlap
        if overlap is None:
            overlap = on_cuda or self.drafter_settings is None
        return 2 if overlap else 1

    def limits(self, *, gpu_bytes: int | None, max_positions: int, vocab_size: int, max_drafts: int) -> Limits:
        """Return the engine's sizes for this model and device. The worker may still lower max_len to the size of the
        page pool. gpu_bytes: total memory of the GPU; None on a CPU."""
        on_cuda = gpu_bytes is not None
        max_len = self.max_model_len or max_positions
        if max_len > max_positions:
            raise ValueError(f"max_model_len ({max_len}) exceeds the {max_positions} positions the model was made for: "
                             "lower max_model_len")
        max_requests = self.max_num_seqs or default_requests(gpu_bytes)
        tokens = self.max_num_batched_tokens or max(8192 if on_cuda else 512, max_requests * (1 + max_drafts))
        _check_padding("pad_requests", self.pad_requests, "max_num_seqs", max_requests)
        _check_padding("pad_tokens", self.pad_tokens, "max_num_batched_tokens", tokens)
        return Limits(max_requests, tokens, max_len, max_drafts, vocab_size,
                      max_logprobs=vocab_size if self.max_logprobs == -1 else self.max_logprobs,
                      steps_in_flight=self.steps_in_flight(on_cuda))


def _check_padding(name: str, sizes: tuple[int, ...], limit_name: str, limit: int) -> None:
    """Refuse sizes with which a full batch is padded far too much. A batch is padded to the smallest size that holds
    it."""
    largest = min((size for size in sizes if size >= limit), default=limit)
    if largest > MAX_PADDING * limit:
        raise ValueError(f"{name}: every step would be padded to {largest}, although no step has more than {limit} "
                         f"({limit_name}): give a size of at most {MAX_PADDING} times {limit}")


def default_requests(gpu_bytes: int | None) -> int:
    """Return the default of max_num_seqs, the most requests in one step. gpu_bytes: total memory of the GPU; None on a
    CPU. A waiting request gets a batch row only when another request has ended, so a GPU with much memory has more
    rows."""
    if gpu_bytes is None:
        return 32
    return 512 if gpu_bytes >= LARGE_GPU_BYTES else 256


def __getattr__(name: str) -> object:
    """Find a config class of vLLM by name, because vLLM's config classes are also in a module named `config`. The
    import is inside the function, because the imported module imports this one."""
    if name.startswith("__"):
        raise AttributeError(name)
    return import_module("outrider.compat.configs").find_config(name)


AUTO_METHOD = "auto"  # the files of `model` tell what it is
METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "block", "mtp", "gemma4_assistant")
NEEDS_MODEL = (AUTO_METHOD, "draft_model", "eagle", "eagle3", "block", "gemma4_assistant")
OTHER_NAMES = {"dflash": "block", "dspark": "block"}  # what vLLM calls a method
ASSISTANT_POSITIONS = ("sampled", "computed")  # the token whose position a Gemma 4 assistant drafts from: the last ...
SYNTHETIC_RATE = 0.6914  # the same at every position: 3 drafts give a mean run of 2.5
MAX_DRAFTS = 16
OWN_DRAFTER = (r"[\w.]+:\w+", "'package.module:Class' for a drafter of your own")
Method: TypeAlias = Annotated[str, OneOf((*METHODS, AUTO_METHOD), *OWN_DRAFTER)]
Rate: TypeAlias = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class SpeculativeConfig:
    """The setting `speculative_config`, with vLLM's keys. Unless `auto` is False, the engine chooses the number of
    drafts in every step, up to `num_speculative_tokens`."""

    num_speculative_tokens: Annotated[int, Range(1, MAX_DRAFTS)]  # most drafts of a request in a step
    method: Method | Annotated[list[Method], NotEmpty] = AUTO_METHOD  # see docs/drafters.md; a list combines some
    model: Text | None = None  # the folder or id of a draft model or head
    prompt_lookup_min: Annotated[int, Range(1, 64)] = 2  # n-gram: shortest match, in tokens
    prompt_lookup_max: Annotated[int, Range(1, 64)] = 4  # n-gram: longest match
    auto: bool = True  # the number of drafts is chosen every step; False: always num_speculative_tokens
    rejection_sample_method: Annotated[str, OneOf(("synthetic",))] | None = None  # benchmarks: see the next two
    synthetic_rates: Annotated[tuple[Rate, ...], NotEmpty] | None = None  # accept drafts at these rates, by position
    synthetic_acceptance_length: Annotated[float, Range(1, 1 + MAX_DRAFTS)] | None = None  # or by this mean run
    synthetic_request_rates: Annotated[tuple[Rate, ...], NotEmpty] | None = None  # or at these, by request, in turn
    assistant_position: Annotated[str, OneOf(ASSISTANT_POSITIONS)] = "sampled"  # Gemma-4 assistant
    min_draft_confidence: Rate = 0.0  # DSpark: leave out drafts that its confidence head trusts less than this
    ignore_config_keys: tuple[Text, ...] = ()  # keys of the drafter's config.json that count as absent

    @classmethod
    def parse(cls, given: dict[str, Any]) -> SpeculativeConfig:
        """Make a SpeculativeConfig from the setting's value. Acceptance rates may be given in several ways; all of them
        are converted to `synthetic_rates`."""
        _refuse_unknown("speculative_config", given, cls)
        method = given.get("method")
        known_method = {} if method is None else {
            "method": [_own_name(each) for each in method] if isinstance(method, list | tuple) else _own_name(method)}
        rest = {key: value for key, value in given.items() if key != "method"}
        if "num_speculative_tokens" not in given:
            raise ValueError("speculative_config: num_speculative_tokens must be given: the most drafts of a request "
                             f'in a step, 1 to {MAX_DRAFTS}: {{"method": "ngram", "num_speculative_tokens": 4}}. '
                             "MLP speculators (mlpspeculator), whose files have it, are not supported")
        if "method" not in given and given.get("model") is None:
            raise ValueError("speculative_config: method must be given, or a 'model' whose files tell it: one of "
                             f"{', '.join(METHODS)} or {OWN_DRAFTER[1]}")
        config = cls(**(rest | known_method))
        return replace(config, synthetic_rates=config._rates(), synthetic_acceptance_length=None)

    def __post_init__(self) -> None:
        check_fields("speculative_config: ", self)
        if AUTO_METHOD in self.methods and self.method != AUTO_METHOD:
            raise ValueError("speculative_config: 'auto' cannot be part of a list of methods: give 'auto' alone, or "
                             "name each method")
        lacking = next((method for method in self.methods if method in NEEDS_MODEL), None)
        if self.model is None and lacking == AUTO_METHOD:
            raise ValueError(f"speculative_config: method must be one of {', '.join(METHODS)} or {OWN_DRAFTER[1]}, got "
                             "None: name one, or give a 'model', whose files say which it is for")
        if self.model is None and lacking is not None:
            raise ValueError(f"speculative_config: method {lacking!r} needs 'model', the folder or id of the drafter")
        low, high, k = self.prompt_lookup_min, self.prompt_lookup_max, self.num_speculative_tokens
        if low > high:
            raise ValueError(f"speculative_config: prompt_lookup_min ({low}) must be from 1 to prompt_lookup_max "
                             f"({high})")
        if self.synthetic_acceptance_length is not None and self.synthetic_rates is not None:
            raise ValueError("speculative_config: synthetic_rates and synthetic_acceptance_length say the same thing: "
                             "give one of them")
        if self.synthetic_request_rates is not None and (self.synthetic_rates or self.synthetic_acceptance_length):
            raise ValueError("speculative_config: synthetic_request_rates already give a rate for every position: "
                             "leave out synthetic_rates and synthetic_acceptance_length")
        if (self.synthetic_acceptance_length or 1) > 1 + k:
            raise ValueError(f"speculative_config: synthetic_acceptance_length must be from 1 to {1 + k} "
                             f"(num_speculative_tokens + 1), got {self.synthetic_acceptance_length}")

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.method,) if isinstance(self.method, str) else tuple(self.method)

    @property
    def rates_by_row(self) -> tuple[tuple[float, ...], ...] | None:
        """Return acceptance rates for synthetic acceptance, which benchmarks use. Each tuple has the rates by draft
        position; batch rows use the tuples in turn. None if the model decides which drafts are accepted."""
        if self.synthetic_request_rates is not None:
            return tuple((float(rate),) for rate in self.synthetic_request_rates)
        return None if self.synthetic_rates is None else (self.synthetic_rates,)

    @property
    def is_synthetic(self) -> bool:
        """Whether drafts are accepted at random with given rates, not by comparing them with the model's tokens."""
        return self.rates_by_row is not None

    def _rates(self) -> tuple[float, ...] | None:
        length = self.synthetic_acceptance_length
        if self.synthetic_rates is not None:
            return tuple(map(float, self.synthetic_rates))
        if self.synthetic_request_rates is not None:
            return None
        if length is not None:  # vLLM's pattern: whole drafts first, then a part of one; 2.5 is 1, 0.5, 0
            return tuple(min(1.0, max(0.0, length - 1 - j)) for j in range(self.num_speculative_tokens))
        return (SYNTHETIC_RATE,) if self.rejection_sample_method == "synthetic" else None


def _own_name(method: object) -> object:
    """Translate vLLM's name of a method to the name that is used here. Other values are returned unchanged."""
    return OTHER_NAMES.get(method, method) if isinstance(method, str) else method


LOCAL_EVENTS = "tcp://127.0.0.1:5557"  # where events are published unless told otherwise


@dataclass(frozen=True)
class KVEventsConfig:
    """The setting `kv_events_config`, with vLLM's keys and three more (bind, token_ids, hash_secret): where events of
    the prefix cache are published, and what they contain. Everyone who can connect to the address can read them."""

    enable_kv_cache_events: bool = False
    publisher: Annotated[str, OneOf(("zmq", "null"))] | None = None  # None: zmq
    endpoint: Text = LOCAL_EVENTS
    bind: bool | None = None  # listen there, or connect to it; None: the first for a *, ipc:// and the default
    token_ids: bool = False  # tell the tokens of pages, which are prompts and answers, and their salts
    hash_secret: Text | None = None  # key of the hashes of pages, for those who compute them; None: drawn at start
    replay_endpoint: Text | None = None  # where missed batches can be asked for
    buffer_steps: Count = 10_000  # batches that are kept for that
    hwm: Count = 100_000  # batches that wait for a slow subscriber, in ZeroMQ's queue
    max_queue_size: Count = 100_000  # batches that wait for the publishing thread
    topic: str = ""
    data_parallel_rank: Annotated[int, Range(0, 1023)] = 0  # of a replica: added to ports

    @classmethod
    def parse(cls, given: dict[str, Any]) -> KVEventsConfig:
        _refuse_unknown("kv_events_config", given, cls)
        return cls(**given)

    def __post_init__(self) -> None:
        check_fields("kv_events_config: ", self)
        for name in ("endpoint", "replay_endpoint"):
            self._check_port(name, getattr(self, name))

    def _check_port(self, name: str, address: str | None) -> None:
        """Refuse port 0 and ports that are too large. With port 0 the system would choose the port, and a router could
        not know it. Each replica adds its number to the port."""
        port = "" if address is None or not address.startswith("tcp://") else address.rpartition(":")[2]
        most = 65535 - self.data_parallel_rank
        if port.isdigit() and not 1 <= int(port) <= most:
            more = f", less the replica's number {self.data_parallel_rank}" if self.data_parallel_rank else ""
            raise ValueError(f"kv_events_config: {name} {address!r} needs a port from 1 to 65535{more}")

    @property
    def is_bound(self) -> bool:
        return self.endpoint == LOCAL_EVENTS or is_bound_as_such(self.endpoint) if self.bind is None else self.bind

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def is_bound_as_such(address: str) -> bool:
    """Whether a ZeroMQ socket binds to this address. Otherwise it connects to the address. The rule is vLLM's."""
    return "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))


def _refuse_unknown(section: str, given: dict[str, Any], kind: type[SpeculativeConfig | KVEventsConfig]) -> None:
    """Raise if a section of the settings has a key that is no field of its class."""
    known = list(kind.__dataclass_fields__)
    for key in given:
        if key not in known:
            raise ValueError(f"{section}: {unknown_name('key', str(key), known)}")
