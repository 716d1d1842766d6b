"""`outrider serve`: the server from flags and a YAML file, with its worker in a process of its own.

SIGTERM and Ctrl-C stop new requests, let running ones end within --shutdown-timeout, and end the engine; a second
Ctrl-C does not wait. The worker's process ends with this one, however this one ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from outrider.async_llm import AsyncLLM
from outrider.commands.listening import listening, tls_options
from outrider.commands.parser import ENGINE_FIELDS, UsageError, engine_config
from outrider.commands.serve_files import chat_template, check_files
from outrider.compat.server_settings import VLLM_SERVER_SETTINGS
from outrider.compat.settings import translate
from outrider.core.fields import did_you_mean
from outrider.engine.grammar.deep_thread import end_process
from outrider.engine.start import start_engine
from outrider.engine.step_trace import StepTrace
from outrider.engine.worker_process import WorkerProcess
from outrider.server.settings import ServerConfig

SERVER_FIELDS = {field.name: field for field in fields(ServerConfig)}
NEEDS = "outrider serve needs the server's packages: pip install 'outrider[server]' (in a clone: '.[server]')"
DEFAULT_MODEL = "smollm2"
SWITCH_SECONDS = 0.0005  # how long the engine's thread may wait while a burst of events is sent
# A key on the command line can be read by every user of the machine. vLLM's variable counts too: whoever sets it relies
# on a server that asks for the key.
KEY_VARIABLES = ("OUTRIDER_API_KEY", "VLLM_API_KEY")


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn

        from outrider.server.app import build_app
        from outrider.server.engine_host import EngineHost, Failed
        from outrider.server.http_protocol import BoundedHttp
        from outrider.server.logs import set_up_logs
        from outrider.server.service import Service
        from outrider.server.tracing import Tracing
        from outrider.server.web_server import WebServer
    except ModuleNotFoundError as error:
        raise ValueError(f"{NEEDS} ({error.name} is missing)") from None
    if args.config is not None:
        apply_file(args, Path(args.config))
    args.model = args.model or DEFAULT_MODEL
    engine, config = engine_config(args).for_streams(), server_config(args)
    names = config.served_model_name or (model_name(engine.model),)
    template = chat_template(config)
    check_files(engine, config, template)
    tls = tls_options(config)
    endpoint = config.otlp_traces_endpoint
    tracing = None if endpoint is None else Tracing.to(endpoint, names[0])

    def start() -> AsyncLLM:
        started = start_engine(engine, in_process=True)
        if tracing is not None and config.trace_steps_per_second:
            started.trace = StepTrace(tracing.record_step, config.trace_steps_per_second)
        return AsyncLLM.around(started)

    host = EngineHost(start, stall_timeout=config.stall_timeout, max_restarts=config.max_restarts,
                      end_stalled=kill_worker, has_worker=has_worker, on_serving=lambda: tell("ready"))
    set_up_logs(config.log_format, logs_requests=config.enable_log_requests)
    service = Service(host, config, names, template, tracing)
    server = WebServer(uvicorn.Config(
        build_app(service), http=BoundedHttp, log_level=config.uvicorn_log_level, lifespan="on", server_header=False,
        log_config=None, timeout_graceful_shutdown=int(config.shutdown_timeout),
        access_log=config.uvicorn_log_level != "warning", **tls), tell)

    def stop() -> None:
        server.should_exit = True

    host.on_failed = stop
    sys.setswitchinterval(SWITCH_SECONDS)
    with listening(config) as (own, address):
        # Before uvicorn has handlers of its own, and once more for each signal that it caught, when it has stopped.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop())
        tell(f"{names[0]} at {address} (it answers 503 until the model is loaded)")
        try:
            server.run(sockets=[own])
        finally:
            host.close()
            if tracing is not None:
                tracing.close()
    if isinstance(host.state, Failed):
        raise host.state.error
    tell("stopped")
    end_process(0)
    return 0


def tell(text: str) -> None:
    print(f"outrider: {text}", file=sys.stderr, flush=True)


def kill_worker(llm: AsyncLLM) -> None:
    """The worker does not answer; without it the engine fails, and is started again."""
    if isinstance(llm.engine.runner, WorkerProcess):
        llm.engine.runner.kill()


def has_worker(llm: AsyncLLM) -> bool:
    return not isinstance(llm.engine.runner, WorkerProcess) or llm.engine.runner.is_alive


def server_config(args: argparse.Namespace) -> ServerConfig:
    given = {name: getattr(args, name) for name in (*SERVER_FIELDS, *VLLM_SERVER_SETTINGS) if hasattr(args, name)}
    given = translate("the command line", given, SERVER_FIELDS, VLLM_SERVER_SETTINGS)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    keys = [os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)]
    if "api_key" not in given and keys:
        given["api_key"] = (keys[0],)
    return ServerConfig(**given)


def apply_file(args: argparse.Namespace, path: Path) -> None:
    """Settings of a YAML file, under the names of the flags. What was given as a flag wins."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        given, tree = yaml.safe_load(text) or {}, yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(given, dict):
        raise UsageError(f"{path} must map names of flags to values")
    names = [str(key.value).replace("-", "_") for key, _ in tree.value] if tree is not None else []
    for name in names:
        if names.count(name) > 1:  # YAML itself would take the last one
            raise UsageError(f"{path} has the setting {name!r} twice")
    known = [*ENGINE_FIELDS, *SERVER_FIELDS, *VLLM_SERVER_SETTINGS, "model"]
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError(f"{path}: there is no setting {key!r}{did_you_mean(name, known)}")
        if not hasattr(args, name) or (name == "model" and args.model is None):
            setattr(args, name, _as_field(name, value))


def _as_field(name: str, value: Any) -> Any:
    """Fields that hold several values may be written as one, and YAML's lists are tuples here."""
    field = (ENGINE_FIELDS | SERVER_FIELDS).get(name)
    if field is not None and isinstance(field.default, tuple):
        return tuple(value) if isinstance(value, list) else (value,)
    return value


def model_name(model: str) -> str:
    """A hub id as it is; of a path only the last part, because answers show no paths."""
    return Path(model).absolute().name if Path(model).exists() else model
