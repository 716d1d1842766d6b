"""The application of Ray Serve. It has two deployments: one of engines, which Ray starts, watches and scales, and one
that takes HTTP requests and passes each to an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from outrider.cli import build_parser
from outrider.commands.serve import settings_of
from outrider.config import EngineConfig
from outrider.core.fields import Count, Range, check_fields
from outrider.ray.deployments import EngineReplica, Ingress
from outrider.ray.preflight import versions_here
from outrider.ray.router import PrefixRequestRouter
from outrider.server.settings import ServerConfig

MOST_ONGOING = 100_000  # engines have queues of their own, with bounds of their own (--max-num-queued-reqs)
ANY_HOST = "0.0.0.0"  # Ray's proxies listen, and only Ray's own settings say where
HEALTH_SECONDS = 30.0  # for an engine's answer; bursts of requests can delay it


@dataclass(frozen=True)
class RayConfig:
    """Settings of the application that exist only with Ray."""

    max_replicas: Count | None = None  # scale from `replicas` up to here, and back; None: always `replicas`
    target_ongoing_requests: Annotated[float, Range(0.1, 1e6)] = 32.0  # running and waiting ones of a replica
    upscale_delay_s: Annotated[float, Range(0, 1e6)] = 30.0
    downscale_delay_s: Annotated[float, Range(0, 1e6)] = 600.0
    num_cpus: Annotated[float, Range(0.01, 1e4)] = 1.0  # CPUs that Ray reserves for a replica
    num_gpus: Annotated[float, Range(0, 1024)] | None = None  # GPUs; None: one for each rank, none on a CPU

    def __post_init__(self) -> None:
        check_fields("", self)


def application_from(args: Mapping[str, Any]) -> serve.Application:
    """Build the application from names and values, as `serve run` or a config file of Ray Serve gives them."""
    own = {name: _read(value) for name, value in args.items() if name in RayConfig.__dataclass_fields__}
    words = ["serve"]
    for name, value in args.items():
        words += [] if name in own else _flags(name, value)
    engine, config, names = settings_of(build_parser().parse(words))
    config = replace(config, host=ANY_HOST)
    return application(engine, config, names, RayConfig(**own))


def application(engine: EngineConfig, config: ServerConfig, names: Sequence[str],
                on_ray: RayConfig) -> serve.Application:
    num_gpus = on_ray.num_gpus
    if num_gpus is None:
        num_gpus = 0 if engine.device == "cpu" else engine.tensor_parallel_size
    # Ranks of a replica are processes of its actor, so that they share its node.
    resources = {"num_cpus": on_ray.num_cpus, "num_gpus": num_gpus}
    scaling: dict[str, Any] = {"num_replicas": config.replicas}
    if on_ray.max_replicas is not None:
        scaling = {"autoscaling_config": AutoscalingConfig(
            min_replicas=config.replicas, max_replicas=on_ray.max_replicas,
            target_ongoing_requests=on_ray.target_ongoing_requests, upscale_delay_s=on_ray.upscale_delay_s,
            downscale_delay_s=on_ray.downscale_delay_s)}
    engines = serve.deployment(EngineReplica).options(
        name="Engine", max_ongoing_requests=MOST_ONGOING, ray_actor_options=resources,
        graceful_shutdown_timeout_s=config.shutdown_timeout, health_check_timeout_s=HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRequestRouter), **scaling)
    ingress = serve.deployment(Ingress).options(name="Ingress", max_ongoing_requests=MOST_ONGOING,
                                                ray_actor_options={"num_cpus": 0})  # it mostly waits
    if (on_ray.max_replicas or config.replicas) > 1:  # a response would be stored in one of them, and not be found
        config = replace(config, max_stored_responses=0)
    bound = engines.bind(engine, config, tuple(names), versions_here(), dict(_threads(on_ray, num_gpus)))
    return ingress.bind(bound)


def _threads(on_ray: RayConfig, num_gpus: float) -> dict[str, str]:
    """The environment variable that gives a replica on a CPU as many threads as Ray has reserved CPUs for it."""
    return {} if num_gpus else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, int(on_ray.num_cpus))))}


def _flags(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    match value:
        case bool():
            return [flag if value else f"--no-{flag.removeprefix('--')}"]
        case "true" | "True":
            return [flag]
        case "false" | "False":
            return [f"--no-{flag.removeprefix('--')}"]
        case dict():
            return [flag, json.dumps(value)]
        case list() | tuple():
            return [word for each in value for word in (flag, str(each))]
    return [flag, str(value)]


def _read(value: Any) -> Any:
    """Convert a command-line value that is a number. Other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
