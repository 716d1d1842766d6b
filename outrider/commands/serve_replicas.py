"""`outrider serve --replicas N`: a front that listens, and N processes that each serve one engine at a unix socket.

SIGTERM and Ctrl-C stop new requests, let running ones end within --shutdown-timeout, and end the replicas. Replicas end
with the front, however it ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from outrider.commands.listening import tls_options
from outrider.commands.serve_engine import SWITCH_SECONDS, serve_engine, serve_until_stopped, tell
from outrider.config import EngineConfig
from outrider.core.host_memory import give_large_blocks_back
from outrider.replicas.adapter_changes import AdapterChanges
from outrider.replicas.front import ReplicaFront
from outrider.replicas.placement import replica_environments, visible_devices
from outrider.replicas.policy import PrefixRouter
from outrider.replicas.processes import ReplicaGroup, ReplicaProcess
from outrider.replicas.replica import Replica
from outrider.replicas.trainer_changes import TrainerChanges
from outrider.server.guard import EXPOSED_HEADERS, App, Guard, RootPath, guard_options
from outrider.server.logs import set_up_logs
from outrider.server.lora_modules import read_modules
from outrider.server.settings import ServerConfig
from outrider.server.web_server import WebServer, web_options

SOCKET_PATH_BYTES = 103  # of the path of a unix socket, at most: the least that systems allow (Linux: 107)
log = logging.getLogger("outrider")


def serve_replicas(engine: EngineConfig, config: ServerConfig, names: Sequence[str]) -> int:
    tls = tls_options(config)
    devices_each = engine.tensor_parallel_size
    visible = [] if engine.device == "cpu" else visible_devices()
    environments = replica_environments(engine.device, config.replicas, devices_each, visible)
    folder = socket_folder(config.replicas)
    router = PrefixRouter()
    adapters = AdapterChanges({name: own.path for name, own in read_modules(config.lora_modules).items()})
    trainer = TrainerChanges()
    replicas = [Replica(i, str(folder / f"{i}.sock")) for i in range(config.replicas)]
    codes: list[int] = []  # of replicas that were given up

    def give_up(code: int) -> None:
        codes.append(code)
        server.stop()

    def process_of(replica: Replica) -> ReplicaProcess:
        arguments = (environments[replica.number], replica.name, log.getEffectiveLevel(),
                     numbered(engine, replica.number), behind_front(config, replica), tuple(names))
        return ReplicaProcess(replica, router, adapters, trainer, run_replica, arguments, on_failed=give_up,
                              max_restarts=config.max_restarts, hang_seconds=config.stall_timeout)

    group = ReplicaGroup([process_of(replica) for replica in replicas], stop_seconds=config.shutdown_timeout)
    front = ReplicaFront(replicas, router, adapters, trainer, start=group.start, stop=group.stop)
    set_up_logs(config.log_format, logs_requests=False)  # replicas log requests
    server = WebServer(uvicorn.Config(guarded(front, config), **web_options(config, tls)), tell)
    sys.setswitchinterval(SWITCH_SECONDS)
    give_large_blocks_back()
    try:
        serve_until_stopped(server, config, f"{names[0]}, {config.replicas} replicas,", tell)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if codes:
        tell("a replica failed and was not started again: its own lines above say why")
        return codes[0]
    tell("stopped")
    return 0


def socket_folder(num_replicas: int) -> Path:
    """Make a new folder for the replicas' sockets, which only the user of this process may enter."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))
    longest = os.fsencode(folder / f"{num_replicas - 1}.sock")
    if len(longest) > SOCKET_PATH_BYTES:
        folder.rmdir()
        raise ValueError(f"the replicas' sockets cannot be in {folder.parent}: the path of a unix socket may have "
                         f"{SOCKET_PATH_BYTES} bytes, and {os.fsdecode(longest)} has {len(longest)}; set TMPDIR to a "
                         "shorter path, such as /tmp")
    return folder


def behind_front(config: ServerConfig, replica: Replica) -> ServerConfig:
    """Return the settings of one replica's server. TLS, and the allowed hosts and origins of browsers, are handled by
    the front alone: otherwise headers would be written twice."""
    return replace(config, uds=replica.socket_path, replicas=1, ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None,
                   allowed_origins=(), allowed_hosts=())


def numbered(engine: EngineConfig, number: int) -> EngineConfig:
    """Return the config of one replica. Its number makes the ports and the rank of its cache events unique."""
    given = engine.kv_events_config
    return engine if given is None else replace(engine, kv_events_config=given | {"data_parallel_rank": number})


def guarded(front: App, config: ServerConfig) -> App:
    """Return the front, wrapped in the checks that a server of one engine has: hosts, keys, bodies, origins and path
    prefix."""
    app: App = Guard(front, **guard_options(config))
    if config.allowed_origins:  # outside the guard: a browser asks for permission without a key
        app = CORSMiddleware(app, allow_origins=list(config.allowed_origins), allow_methods=["*"],
                             allow_headers=["*"], expose_headers=EXPOSED_HEADERS)
    return RootPath(app, prefix=config.root_path) if config.root_path else app


def run_replica(environment: dict[str, str], name: str, level: int, engine: EngineConfig, config: ServerConfig,
                names: Sequence[str]) -> None:
    """The main function of a replica's process. It sets environment variables before torch is imported."""
    os.environ.update(environment)
    log.setLevel(level)

    def tell_own(text: str) -> None:
        tell(f"replica {name}: {text}")

    try:
        status = serve_engine(engine, config, names, tell_own)
    except Exception as error:
        tell_own(f"error: {' '.join(str(error).split()) or type(error).__name__}")
        status = 2 if isinstance(error, ValueError | OSError) else 1
    sys.exit(status)
