"""`outrider env`: versions, machine, devices and, with a model, the memory plan: the text for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from outrider import __version__
from outrider.core.host_memory import available_bytes
from outrider.models.config_reader import ConfigReader

PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "numpy", "gguf", "tqdm",
            "llguidance", "transformers", "matplotlib")
VARIABLES = ("OUTRIDER_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE",
             "TRITON_INTERPRET", "PYTORCH_")
GIB = 1 << 30


def run(args: argparse.Namespace) -> int:
    for name, value in [*_software(), *_machine(), *_devices()]:
        print(f"{name + ':':18} {value}")
    if args.model is not None:
        for name, value in _plan(args):
            print(f"{name + ':':18} {value}")
    return 0


def _software() -> list[tuple[str, str]]:
    rows = [("outrider", __version__), ("python", f"{platform.python_version()} ({sys.executable})")]
    rows += [(package, version_of(package) or "not installed") for package in PACKAGES]
    rows += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    return rows


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> list[tuple[str, str]]:
    rows = [("platform", platform.platform()), ("cpu", f"{cpu_name()}, {os.cpu_count()} cores")]
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        rows.append(("memory", f"{total / GIB:.1f} GiB, {available_bytes() / GIB:.1f} GiB free"))
    except (ValueError, OSError):
        rows.append(("memory", "unknown"))
    return rows


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        fields = {}
    named = {name.strip(): value.strip() for name, value in fields.items()}
    return named.get("model name") or _listed_cpu_name() or platform.processor() or platform.machine()


def _listed_cpu_name() -> str:
    """Return the processor's name from `lscpu`, which has names for ARM processors. The system itself gives only their
    numbers."""
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=5, env=os.environ | {"LC_ALL": "C"})
    except (OSError, subprocess.SubprocessError):
        return ""
    names = [line.partition(":")[2].strip() for line in listed.stdout.splitlines() if "Model name:" in line]
    return " and ".join(name for name in dict.fromkeys(names) if name != "-")


def _devices() -> list[tuple[str, str]]:
    import torch

    from outrider.kernels.cpu.build import describe

    rows = [("native kernels", describe()), ("torch threads", str(torch.get_num_threads())),
            ("torch CUDA", str(torch.version.cuda or "not built in"))]
    if not torch.cuda.is_available():
        return [*rows, ("CUDA devices", "none")]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows.append((f"cuda:{index}", f"{about.name}, compute {about.major}.{about.minor}, {total / GIB:.1f} GiB, "
                                      f"{free / GIB:.1f} GiB free"))
    return rows


def _plan(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the memory plan that an engine would make, computed from a model on the meta device, without weights."""
    from outrider.commands.parser import engine_config
    from outrider.models.loader import describe_weights
    from outrider.models.registry import build_model
    from outrider.models.sources import resolve
    from outrider.runner.cache_plan import plan_cache
    from outrider.runner.device import gpu_bytes, pick_device, pick_dtype
    from outrider.runner.memory import fit_max_len, plan_memory
    from outrider.runner.target import declare_stored

    config = engine_config(args)
    device = pick_device(config.device)
    source = resolve(config.model, config.revision, False, config.download_dir)
    source = source.with_values(config.hf_overrides or {}).without_keys(config.ignore_config_keys)
    dtype = pick_dtype(config.dtype, source, device)
    model = build_model(source.config, dtype=dtype, device="meta", max_len=config.max_model_len,
                        source=str(source.config_file), model_impl=config.model_impl)
    drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    limits = config.limits(gpu_bytes=gpu_bytes(device), max_positions=model.max_positions,
                           vocab_size=model.vocab_size, max_drafts=drafts)
    layout = plan_cache(config, model)
    declare_stored(model, config, source, device)
    plan = plan_memory(config, layout, limits, device, weight_bytes=sum(s.nbytes for s in model.weights().values()))
    limits = fit_max_len(config, layout, limits, plan)
    uncounted = [name for name, is_there in (
        ("the drafter", drafts), ("packed copies of the weights", device.type == "cpu" and config.packed_weights),
    ) if is_there]
    groups = ", ".join(f"{len(group.layers)} layers in pages of {group.page_tokens} tokens" for group in layout.groups)
    return [
        ("model", f"{source.name} ({', '.join(source.config.get('architectures', []))}), {source.path}"),
        ("computed by", _code_of(source.reader(), config.model_impl)),
        ("runs as", f"{str(dtype).removeprefix('torch.')} on {device}"),
        ("weights", describe_weights(model.weights())),
        ("memory plan", plan.report() + (f" (without {' and '.join(uncounted)})" if uncounted else "")),
        ("cache groups", groups),
        ("limits", f"{limits.max_requests} requests, {limits.max_batched_tokens} tokens a step, "
                   f"{limits.max_len} tokens a request, {limits.max_drafts} drafts"),
    ]


def _code_of(reader: ConfigReader, model_impl: str) -> str:
    """Say which code would run the model: a family of this package, or transformers."""
    from outrider.models.registry import has_family, named_architectures

    if has_family(named_architectures(reader)) and model_impl != "transformers":
        return "a family of outrider"
    return (f"transformers {version_of('transformers')}, with outrider's attention and layers inside "
            "(docs/models.md#through-transformers)")
