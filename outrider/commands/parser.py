"""Arguments: flags made from the fields of EngineConfig and SamplingParams, and a parser that suggests corrections.

A flag that is not given is absent from the namespace, so defaults are defined in the dataclasses only. No torch."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from outrider.commands.flag_values import CONVERTERS, whole_number
from outrider.commands.golden_acceptance import golden_rates
from outrider.commands.help import HelpAction, help_text
from outrider.commands.server_help import SERVER_HELP
from outrider.commands.vllm_flags import add_unlisted_flags, own_flags
from outrider.compat.engine_args import config_for
from outrider.compat.server_settings import VLLM_SERVER_SETTINGS
from outrider.compat.settings import VALUES, VLLM_SETTINGS
from outrider.config import DTYPES, LOAD_FORMATS, LOGPROBS_MODES, MODEL_IMPLS, EngineConfig
from outrider.core import SamplingParams
from outrider.core.fields import did_you_mean
from outrider.feature_list import flag_help
from outrider.lora_request import CONFIG as ADAPTER_CONFIG
from outrider.lora_request import LoRARequest
from outrider.server.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from outrider.server.settings import LOG_FORMATS, LOG_LEVELS, ServerConfig

ENGINE_HELP = flag_help() | {
    "tokenizer": "a folder, a .gguf file or a hub id with the tokenizer, instead of the model's own",
    "revision": "of a hub id: a branch, a tag or a commit",
    "download_dir": "where files from the hub are kept",
    "dtype": "type of weights and arithmetic",
    "device": "auto, cpu, cuda or cuda:N",
    "tensor_parallel_size": "ranks that hold the model together: each a process with its part of every weight",
    "nnodes": "machines that share the ranks; each runs the command with its own --node-rank (docs/scale.md)",
    "node_rank": "this machine among them; node 0 has the engine",
    "master_addr": "address of node 0",
    "master_port": "port of node 0 at which it waits for the others",
    "max_model_len": "longest request in tokens, prompt and answer",
    "max_num_seqs": "most requests in one step (32 on a CPU)",
    "max_num_batched_tokens": "most tokens in one step; longer prompts are computed in chunks",
    "max_step_ms": "GPU: longest step with prompts while requests decode, except in bursts; serve: 12, otherwise none",
    "page_size": "tokens of the smallest page",
    "num_pages": "pages of the cache",
    "kv_cache_memory_bytes": "bytes of the cache",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "kv_cache_dtype": "how keys and values are stored; auto: in the model's dtype",
    "kv_cache_dtype_skip_layers": "layers that keep the model's dtype: a number, or sliding_window (repeat)",
    "enable_prefix_caching": "share the cache of equal beginnings of prompts",
    "checkpoint_interval": "tokens between the states of recurrent layers that are kept for prefix hits",
    "overlap": "schedule the next step while the last one runs",
    "seed": "seed of sampling and random weights",
    "load_format": "dummy: random weights",
    "model_impl": "code that computes the model: outrider (a family here), transformers, or auto (a family, else "
                  "transformers)",
    "attention_backend": "which attention to run: auto, torch, native, triton or flex; vLLM's names mean the nearest",
    "enforce_eager": "GPU: launch every step without captured graphs, which is slower",
    "hf_overrides": "values of config.json to replace or add, a JSON object",
    "kv_events_config": "publish what the prefix cache holds, as vLLM does; a JSON object (docs/replicas.md)",
    "host_cache_memory": "host memory for pages of the cache that leave the device, as 4GiB (docs/cache.md)",
    "disk_cache_dir": "a folder for pages of the cache, which the next start finds again (docs/cache.md)",
    "disk_cache_size": "the most bytes in that folder, as 50GiB",
    "profiler_dir": "the folder that profiles are written to",
    "worker_extension_cls": "a class for collective_rpc, as package.module.Class; trainers set it",
    "skip_tokenizer_init": "read no tokenizer: token ids in, token ids out",
    "logits_processors": "a class that changes logits, as package.module:Class (repeat for several)",
    "logprobs_mode": "log-probabilities of raw logits, or of processed ones",
    "max_logprobs": "most log-probabilities a request may ask for; -1: of the whole vocabulary",
    "pad_requests": "sizes that batches are padded up to, as 4,8,16",
    "pad_tokens": "the same for tokens",
    "speculative_config": 'a JSON object, as \'{"method": "ngram", "num_speculative_tokens": 4}\'; '
                          "auto: the drafter that comes with smollm2",
    "adapt_drafter": "the EAGLE-3 head learns from the traffic while it serves (in memory only; docs/training.md)",
    "adapt_memory_bytes": "memory for served texts that the drafter learns from",
    "adapt_share": "share of the time that the drafter's trainer may work while requests run",
    "exact": "the same bits alone and in any batch; slower",
    "fit": "choose settings with which the model fits",
    "packed_weights": "CPU: keep a second copy of the weights for steps of a few tokens",
    "keep_quantized": "keep weights in the bits of quantised files instead of numbers; the results are the same",
    "quantization": "bring linear layers and experts of an unquantised model into these bits while they are read",
    "activation_bits": "CPU, weights in GGUF bits, integers or fp4: 8 rounds activations for speed, 32 not at all",
    "enable_lora": "requests may name adapters (LoRA)",
    "max_loras": "adapters on the device at once, which the requests of a step may have",
    "max_lora_rank": "the largest rank of an adapter",
    "max_cpu_loras": "adapters in the host's memory",
    "lora_memory_bytes": "device memory for adapters, instead of max_loras of the largest rank",
    "ignore_config_keys": "a key of config.json that counts as absent, where it is unknown here and harmless (repeat)",
    "index_key_dtype": "sparse attention: fp8 stores the indexers' keys in half the memory, rounded, with a scale each",
}
SAMPLING_HELP = flag_help() | {
    "n": "samples per prompt",
    "temperature": "0 takes the likeliest token",
    "top_p": "keep the likeliest tokens of this total probability",
    "top_k": "keep so many tokens; 0: all",
    "min_p": "keep tokens at least this likely relative to the likeliest",
    "max_tokens": "longest answer in tokens",
    "min_tokens": "no end before this many tokens",
    "stop": "end the answer before this text (repeatable)",
    "stop_token_ids": "end the answer at these tokens, as 1,2",
    "presence_penalty": "against tokens that were said",
    "frequency_penalty": "against tokens by how often they were said",
    "repetition_penalty": "divide the logits of tokens that were said or asked",
    "include_stop_str_in_output": "keep the text that ended the answer",
    "skip_special_tokens": "leave special tokens out of the text",
    "detokenize": "make text of the tokens",
    "skip_reading_prefix_cache": "compute the whole prompt",
    "ignore_eos": "go on after the end-of-text token",
    "logit_bias": "a JSON object of token id to bias",
    "bad_words": "never say this (repeat for several)",
    "allowed_token_ids": "say only these, as 1,2",
    "logprobs": "log-probabilities of this many tokens (with --json)",
    "prompt_logprobs": "the same for the prompt",
    "prompt_logprobs_mode": "of the prompt: raw, or processed by temperature and filters",
    "extra_args": "values for the engine's logits processors, a JSON object",
    "speculative": "false: no drafts; a number: at most so many",
    "structured_outputs": "the form of the text, a JSON object with json, regex, choice, grammar or json_object",
}
CHOICES: dict[str, Sequence[str]] = {
    "dtype": [*DTYPES, *VALUES["dtype"]],
    "load_format": [*LOAD_FORMATS, *VALUES["load_format"]],
    "model_impl": [*MODEL_IMPLS, *VALUES["model_impl"]],
    "logprobs_mode": [*LOGPROBS_MODES, *VALUES["logprobs_mode"]],
    "prompt_logprobs_mode": ("raw", "processed"),
    "log_format": LOG_FORMATS,
    "uvicorn_log_level": LOG_LEVELS,
    "pooling": ("last", "mean"),
    "tool_call_parser": sorted(TOOL_FORMATS),
    "reasoning_parser": sorted(REASONING_FORMATS),
}
# Flags that a command may lack although others, here or elsewhere, have them: what to write instead.
ELSEWHERE = {
    "--routing": "--routing is for `outrider bench throughput` and `latency` alone: it replaces the experts that the "
                 "model chooses, so its text would mean nothing",
    "--prompt": "`outrider generate` has it, with --chat for a single question",
    "-p": "`outrider generate --prompt TEXT` takes a prompt",
    "--stream": "answers are streamed on a terminal",
}
SHAPE_FLAGS = ("--batch-size", "--input-len", "--output-len", "--num-prompts")  # of others' benchmarks
SHORT_FLAGS = {"tensor_parallel_size": ("-tp",)}
# The engine's seed serves requests without one, the engine fills in bad_words_token_ids, and Python has output_kind.
NOT_FLAGS = ("model", "seed", "bad_words_token_ids", "output_kind", "return_sampling_mask")
# Settings of vLLM's engine that are none here; those that the server has are flags of its own.
OTHER_SETTINGS = {name: meaning for name, meaning in VLLM_SETTINGS.items()
                  if name not in ServerConfig.__dataclass_fields__}
ENGINE_FIELDS = {f.name: f for f in dataclasses.fields(EngineConfig) if f.name != "model"}
SAMPLING_FIELDS = {f.name: f for f in dataclasses.fields(SamplingParams) if f.name not in NOT_FLAGS}
# Types of the fields, without their bounds.
PLAIN_TYPES = get_type_hints(EngineConfig) | get_type_hints(SamplingParams) | get_type_hints(ServerConfig)


class UsageError(ValueError):
    """Raised for a command line that cannot be understood. The message says what to write instead."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Formats help: line ends are kept, and flags get enough room that most help texts fit on their line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(120, shutil.get_terminal_size((110, 24)).columns - 2))


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest flag, command or choice. It never prints or exits on an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs["allow_abbrev"] = False  # a part of a flag is a mistake, not a flag
        kwargs["add_help"] = False
        super().__init__(*args, **kwargs)
        self.add_argument("-h", "--help", action=HelpAction)

    def format_help(self) -> str:
        return help_text(self)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            what = action.dest.replace("_", " ") if not action.option_strings else action.option_strings[0]
            hint = did_you_mean(str(value), names)
            listed = ", ".join(names)
            self.error(f"{what} {value!r}{hint} It must be one of {listed}" if hint else
                       f"{what}: {value!r} is not one of {listed}")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(own_flags(argv))
        if not unknown:
            return _with_model_flag(args)
        own: Parser = getattr(args, "parser", self)
        flags = [word for word in unknown if word.startswith("-")]
        known = [option for action in own._actions for option in action.option_strings]
        if not flags:
            own.error(f"unexpected argument {unknown[0]!r}" + (": --prompt gives one" if "--prompt" in known else ""))
        name = flags[0].split("=")[0]
        if name in known:
            own.error(f"{name} comes after the command: `{own.prog} {name}`")
        if f"{name}s" in known:
            own.error(f"there is no flag {name}: did you mean {name}s?")
        if name in SHAPE_FLAGS and "--shapes" in known:
            own.error(f"`{own.prog}` has no flag {name}: write the shape, as --shapes 8x128x64: requests x tokens in x "
                      "tokens out")
        if name == "--num-prompts" and "--num-requests" in known:
            own.error(f"`{own.prog}` has no flag {name}: did you mean --num-requests?")
        if name in ELSEWHERE:
            own.error(f"`{own.prog}` has no flag {name}: {ELSEWHERE[name]}")
        if name.removeprefix("--").replace("-", "_") in (*ENGINE_FIELDS, *SAMPLING_FIELDS):
            own.error(f"`{own.prog}` has no flag {name}: other commands have it")
        if name.startswith("--") and (others := [p.prog for p in self._commands() if name in p._option_string_actions]):
            have = "has" if len(others) == 1 else "have"
            own.error(f"`{own.prog}` has no flag {name}: {', '.join(f'`{other}`' for other in others)} {have} it")
        own.error(f"there is no flag {name}{did_you_mean(name, known)}")

    def _commands(self) -> Iterator[Parser]:
        """The parsers of all subcommands, at any depth."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield command
                    yield from command._commands()


def _with_model_flag(args: argparse.Namespace) -> argparse.Namespace:
    """Use the model of the flag --model, which some commands of vLLM have, as the positional argument."""
    if hasattr(args, "model_flag"):
        args.model = args.model_flag
        del args.model_flag
    return args


def add_model(parser: argparse.ArgumentParser, default: str | None = "smollm2") -> None:
    help_text = "a folder, a .gguf file or a hub id" + (f" (default: {default})" if default else "")
    parser.add_argument("model", nargs="?", default=default, metavar="MODEL", help=help_text)
    parser.add_argument("--model", dest="model_flag", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_lora(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lora", metavar="FOLDER", help="a PEFT folder: answer with this adapter (LoRA)")


def add_engine_flags(parser: argparse.ArgumentParser, skip: Sequence[str] = ()) -> None:
    group = parser.add_argument_group("engine")
    for name, field in ENGINE_FIELDS.items():
        if name not in skip:
            _add_flag(group, field, ENGINE_HELP.get(name, ""))
    add_unlisted_flags(group, {name: meaning for name, meaning in OTHER_SETTINGS.items() if name not in skip})


def add_sampling_flags(parser: argparse.ArgumentParser, skip: Sequence[str] = (), **defaults: Any) -> None:
    """Add flags for the fields of SamplingParams. `defaults`: defaults of the command that differ from those of
    SamplingParams."""
    group = parser.add_argument_group("sampling")
    for name, field in SAMPLING_FIELDS.items():
        if name in skip:
            continue
        _add_flag(group, field, SAMPLING_HELP.get(name, ""), defaults.get(name, field.default))
    parser.set_defaults(sampling_defaults=defaults)


def add_server_flags(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """Add flags for settings of the server. names: the settings that become flags; None: all."""
    group = parser.add_argument_group("server")
    for field in dataclasses.fields(ServerConfig):
        if names is None or field.name in names:
            _add_flag(group, field, SERVER_HELP.get(field.name, ""))
    if names is None:
        add_unlisted_flags(group, VLLM_SERVER_SETTINGS)
        group.add_argument("--data-parallel-size", "-dp", dest="replicas", type=whole_number, default=argparse.SUPPRESS,
                           help=argparse.SUPPRESS)  # vLLM's name


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    settings = {name: getattr(args, name) for name in (*ENGINE_FIELDS, *OTHER_SETTINGS) if hasattr(args, name)}
    for name in ("synthetic_rates", "synthetic_request_rates", "acceptance"):
        given, flag = getattr(args, name, None), f"--{name.replace('_', '-')}"
        if given is None:
            continue
        drafts = settings.get("speculative_config")
        if not isinstance(drafts, dict):
            raise UsageError(f"{flag} needs --speculative-config: add it, or leave {flag} out")
        settings["speculative_config"] = drafts | (
            _golden(given, drafts) if name == "acceptance" else {name: _rates(flag, given)})
    if getattr(args, "lora", None) is not None:
        settings["enable_lora"] = True  # the engine must have room for the adapter
    return settings


def _rates(flag: str, given: str) -> list[float]:
    try:
        return [float(rate) for rate in given.split(",")]
    except ValueError:
        raise UsageError(f"{flag}: {given!r} is not a list of numbers separated by commas, such as 1,0.5,0") from None


def _golden(given: str, drafts: dict[str, Any]) -> dict[str, list[float]]:
    number = drafts.get("num_speculative_tokens")
    if not isinstance(number, int):
        raise UsageError("--acceptance needs a --speculative-config with num_speculative_tokens: add it, or leave "
                         "--acceptance out")
    try:
        return {"synthetic_rates": golden_rates(given, number)}
    except ValueError as error:
        raise UsageError(str(error)) from None


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """Make the EngineConfig from the flags. `defaults`: values of flags that were not given."""
    return config_for("the command line", args.model, defaults | engine_settings(args))


def named_adapter(args: argparse.Namespace) -> LoRARequest | None:
    """Return the adapter that `--lora` names."""
    if args.lora is None:
        return None
    if not (Path(args.lora) / ADAPTER_CONFIG).is_file():
        raise UsageError(f"--lora: {args.lora} is not a folder with a LoRA adapter: it holds no {ADAPTER_CONFIG}. "
                         "Name one that does")
    return LoRARequest(Path(args.lora).name or "lora", 1, args.lora)


def check_flags(args: argparse.Namespace) -> None:
    """Raise an error for flags that contradict each other, or with which no engine could start."""
    if getattr(args, "model", None) is not None and any(hasattr(args, name) for name in ENGINE_FIELDS):
        engine_config(args)
    if hasattr(args, "sampling_defaults"):
        sampling_params(args)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    given = {name: getattr(args, name) for name in SAMPLING_FIELDS if hasattr(args, name)}
    return SamplingParams(**(args.sampling_defaults | given))


def _add_flag(group: Any, field: dataclasses.Field[Any], help_text: str, default: Any = dataclasses.MISSING) -> None:
    flag = "--" + field.name.replace("_", "-")
    default = field.default if default is dataclasses.MISSING else default
    shown = "" if default is None or default is False or default == () else f" (default: {default})"
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS,
                              "help": (help_text + shown).strip().replace("%", "%%")}
    kind = PLAIN_TYPES[field.name]
    if kind in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif kind in (str | list[str] | None, list[str] | None, tuple[str, ...], tuple[Any, ...]):
        group.add_argument(flag, action="append", metavar="TEXT", **common)
    elif field.name in CHOICES:
        group.add_argument(flag, choices=CHOICES[field.name], **common)
    elif kind in CONVERTERS:
        metavar, convert = CONVERTERS[kind]
        group.add_argument(*SHORT_FLAGS.get(field.name, ()), flag, type=convert, metavar=metavar, **common)
