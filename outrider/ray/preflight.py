"""Checks made before a replica loads weights: whether the cluster answers, and whether the node is ready. All problems
are reported at once, each by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from outrider import __version__
from outrider.commands.serve_files import chat_template, check_files
from outrider.config import EngineConfig
from outrider.replicas.placement import VISIBLE
from outrider.server.settings import ServerConfig

ANSWER_SECONDS = 10.0  # for a cluster's address to take a connection
PACKAGES = ("torch", "ray", "safetensors", "tokenizers")


class NodeNotReady(RuntimeError):
    """Raised if a replica cannot start on its node. The message lists all problems."""


def check_address(address: str) -> None:
    """Raise ValueError if nothing listens at a cluster's address, `host:port` or `ray://host:port`. Ray itself tries
    for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # `auto` or `local`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"no Ray cluster answers at {address} ({error}): set RAY_ADDRESS to one that does, or unset "
                         "it to use this machine alone") from None


def versions_here() -> dict[str, str]:
    found = {"outrider": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def check_node(engine: EngineConfig, config: ServerConfig, wanted: Mapping[str, str], num_gpus: int | None,
               environment: Mapping[str, str] = os.environ) -> None:
    """Check that this node is ready. `wanted`: versions of packages where the application was built. `num_gpus`: the
    GPUs that Ray gave to the replica; None on a CPU."""
    found = versions_here()
    problems = [f"{name} is {found.get(name, 'none')} here and {number} where the application was built"
                for name, number in wanted.items() if found.get(name, "none") != number]
    if num_gpus is not None and num_gpus < engine.tensor_parallel_size:
        problems.append(f"{engine.tensor_parallel_size} GPUs are needed for its ranks, and Ray gave it {num_gpus} "
                        f"({VISIBLE}={environment.get(VISIBLE, '')!r})")
    try:
        check_files(engine, chat_template(config.chat_template))
    except (ValueError, OSError) as error:
        problems.append(" ".join(str(error).split()))
    if problems:
        raise NodeNotReady(f"the node {os.uname().nodename} cannot run a replica: " + "; ".join(problems))
