"""`outrider serve`: the server's settings from flags and a YAML file, and then one engine or several replicas of it."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from outrider.commands.parser import ENGINE_FIELDS, UsageError, engine_config
from outrider.commands.serve_files import chat_template, check_files
from outrider.compat.server_settings import VLLM_SERVER_SETTINGS
from outrider.compat.settings import translate
from outrider.config import EngineConfig
from outrider.core.fields import did_you_mean
from outrider.server.settings import ServerConfig

SERVER_FIELDS = {field.name: field for field in fields(ServerConfig)}
NEEDS = "outrider serve needs the server's packages: pip install 'outrider[server]' (in a clone: '.[server]')"
DEFAULT_MODEL = "smollm2"
# A key on the command line can be read by every user of the machine. vLLM's variable counts too: whoever sets it relies
# on a server that asks for the key.
KEY_VARIABLES = ("OUTRIDER_API_KEY", "VLLM_API_KEY")


def run(args: argparse.Namespace) -> int:
    try:
        from outrider.commands.serve_engine import serve_engine
        from outrider.commands.serve_replicas import serve_replicas
    except ModuleNotFoundError as error:
        raise ValueError(f"{NEEDS} ({error.name} is missing)") from None
    engine, config, names = settings_of(args)
    if engine.node_rank > 0:
        from outrider.commands.serve_node import serve_node

        return serve_node(engine_config(args))  # settings of streams are node 0's
    if engine.nnodes > 1 and config.replicas > 1:
        raise ValueError(f"replicas={config.replicas} cannot be used with nnodes={engine.nnodes}, which spreads one "
                         "engine over several machines: start one server for each engine")
    check_files(engine, chat_template(config.chat_template))
    return (serve_engine if config.replicas == 1 else serve_replicas)(engine, config, names)


def settings_of(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig, tuple[str, ...]]:
    """Return the settings of the engine and of the server, and the names under which the model is served."""
    if args.config is not None:
        apply_file(args, Path(args.config))
    args.model = args.model or DEFAULT_MODEL
    engine, config = engine_config(args).for_streams(), server_config(args)
    check_adapters(engine, config)
    return engine, config, config.served_model_name or (model_name(engine.model),)


def check_adapters(engine: EngineConfig, config: ServerConfig) -> None:
    if (config.lora_modules or config.lora_root) and not engine.enable_lora:
        raise ValueError("lora_modules and lora_root need --enable-lora: add it, or leave them out")


def server_config(args: argparse.Namespace) -> ServerConfig:
    given = {name: getattr(args, name) for name in (*SERVER_FIELDS, *VLLM_SERVER_SETTINGS) if hasattr(args, name)}
    given = translate("the command line", given, SERVER_FIELDS, VLLM_SERVER_SETTINGS)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    keys = [os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)]
    if "api_key" not in given and keys:
        given["api_key"] = (keys[0],)
    return ServerConfig(**given)


def apply_file(args: argparse.Namespace, path: Path) -> None:
    """Apply the settings of a YAML file, which has the names of the flags. A flag that was given overrides the file."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        given, tree = yaml.safe_load(text) or {}, yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(given, dict):
        raise UsageError(f"{path} must map names of flags to values, such as port: 8000")
    names = [str(key.value).replace("-", "_") for key, _ in tree.value] if tree is not None else []
    for name in names:
        if names.count(name) > 1:  # YAML itself would take the last one
            raise UsageError(f"{path} has the setting {name!r} twice: remove one")
    known = [*ENGINE_FIELDS, *SERVER_FIELDS, *VLLM_SERVER_SETTINGS, "model"]
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError(f"{path}: there is no setting {key!r}{did_you_mean(name, known)}")
        if not hasattr(args, name) or (name == "model" and args.model is None):
            setattr(args, name, _as_field(name, value))


def _as_field(name: str, value: Any) -> Any:
    """Convert a value of a YAML file for its field. If the field is a tuple, a list becomes a tuple, and a single value
    becomes a tuple of one."""
    field = (ENGINE_FIELDS | SERVER_FIELDS).get(name)
    if field is not None and isinstance(field.default, tuple):
        return tuple(value) if isinstance(value, list) else (value,)
    return value


def model_name(model: str) -> str:
    """Return the name for a model: a hub id unchanged, but only the last part of a path, because answers show no
    paths."""
    return Path(model).absolute().name if Path(model).exists() else model
