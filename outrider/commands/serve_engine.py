"""Serves one engine over HTTP. The engine's worker is a separate process.

SIGTERM and Ctrl-C stop new requests, let running ones end within --shutdown-timeout, and end the engine; a second
Ctrl-C does not wait. The worker's process ends with this one, however this one ends.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

import uvicorn

from outrider.async_llm import AsyncLLM
from outrider.commands.listening import listening, tls_options
from outrider.commands.serve_files import chat_template
from outrider.config import EngineConfig
from outrider.core.deep_thread import end_process
from outrider.core.host_memory import give_large_blocks_back
from outrider.core.status_line import say
from outrider.engine.start import start_engine
from outrider.engine.step_trace import StepTrace
from outrider.engine.worker_process import WorkerProcess
from outrider.server.app import build_app
from outrider.server.engine_host import EngineHost, Failed
from outrider.server.logs import set_up_logs
from outrider.server.service import Service
from outrider.server.settings import ServerConfig
from outrider.server.tenant_secret import kept_secret
from outrider.server.tracing import Tracing
from outrider.server.web_server import WebServer, web_options

SWITCH_SECONDS = 0.0005  # how long the engine's thread may wait while a burst of events is sent


def tell(text: str) -> None:
    say(f"outrider: {text}")


def serve_engine(engine: EngineConfig, config: ServerConfig, names: Sequence[str],
                 tell: Callable[[str], None] = tell) -> int:
    """Serve until a signal comes. `tell` shows a line to the user."""
    tls = tls_options(config)
    endpoint = config.otlp_traces_endpoint
    tracing = None if endpoint is None else Tracing.to(endpoint, names[0])

    host = make_host(engine, config, tracing, lambda: tell("ready"))
    set_up_logs(config.log_format, logs_requests=config.enable_log_requests)
    service = Service(host, config, names, chat_template(config.chat_template), tracing)
    server = WebServer(uvicorn.Config(build_app(service, kept_secret(engine)), **web_options(config, tls)), tell)

    host.on_failed = server.stop
    sys.setswitchinterval(SWITCH_SECONDS)
    give_large_blocks_back()
    try:
        serve_until_stopped(server, config, names[0], tell)
    finally:
        host.close()
        if tracing is not None:
            tracing.close()
    if isinstance(host.state, Failed):
        raise host.state.error
    tell("stopped")
    end_process(0)
    return 0


def make_host(engine: EngineConfig, config: ServerConfig, tracing: Tracing | None,
              on_serving: Callable[[], None]) -> EngineHost:
    """Make the EngineHost of an engine whose worker is a separate process."""

    def start() -> AsyncLLM:
        started = start_engine(engine, in_process=True)
        if tracing is not None and config.trace_steps_per_second:
            started.trace = StepTrace(tracing.record_step, config.trace_steps_per_second)
        return AsyncLLM.around(started)

    return EngineHost(start, stall_timeout=config.stall_timeout, max_restarts=config.max_restarts,
                      end_stalled=kill_worker, has_worker=has_worker, on_serving=on_serving)


def serve_until_stopped(server: WebServer, config: ServerConfig, title: str, tell: Callable[[str], None]) -> None:
    with listening(config) as (own, address):
        # Before uvicorn has handlers of its own, and once more for each signal that it caught, when it has stopped.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        tell(f"{title} at {address} (it answers 503 until the model is loaded)")
        server.run(sockets=[own])


def kill_worker(llm: AsyncLLM) -> None:
    """End a worker that does not answer. The engine fails without it, and is started again."""
    if isinstance(llm.engine.runner, WorkerProcess):
        llm.engine.runner.kill()


def has_worker(llm: AsyncLLM) -> bool:
    return not isinstance(llm.engine.runner, WorkerProcess) or llm.engine.runner.is_alive
