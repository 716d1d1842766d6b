"""`outrider serve --ray`: runs the application `outrider.ray:app` on a Ray cluster until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import threading

from outrider.commands.serve import settings_of
from outrider.commands.serve_engine import tell
from outrider.commands.serve_files import chat_template, check_files
from outrider.ray import NEEDS
from outrider.ray.preflight import check_address


def run(args: argparse.Namespace) -> int:
    try:
        import ray
        from ray import serve

        from outrider.ray.application import RayConfig, application
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "ray":
            raise
        raise ValueError(NEEDS) from None
    engine, config, names = settings_of(args)
    for name in ("uds", "ssl_certfile", "root_path"):
        if getattr(config, name):
            raise ValueError(f"--ray: leave out --{name.replace('_', '-')}: Ray's proxies listen, not this server")
    check_files(engine, chat_template(config.chat_template))
    address = os.environ.get("RAY_ADDRESS")
    if address is not None:
        check_address(address)
    try:
        ray.init(address=address, ignore_reinit_error=True)
    except Exception as error:  # Ray raises plain ones, too
        at = "on this machine" if address is None else f"at {address}"
        raise ValueError(f"cannot connect to a Ray cluster {at}: {error}. Start one with `ray start --head`, or "
                         "correct RAY_ADDRESS") from None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)  # in place of Ray's own handlers, which abort the process within seconds
    try:
        serve.start(http_options={"host": config.host, "port": config.port})
        serve.run(application(engine, config, names, RayConfig()), name=names[0], route_prefix="/")
        tell(f"{names[0]}, {config.replicas} replicas on Ray, at http://{config.host}:{config.port}")
        threading.Event().wait()
    except _Stopped:
        pass
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # replicas are ending
        serve.delete(names[0])
        ray.shutdown()
    tell("stopped")
    return 0


class _Stopped(BaseException):
    """Raised when a signal arrives, also while replicas start."""


def _stop(*_: object) -> None:
    raise _Stopped
