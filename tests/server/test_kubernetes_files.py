"""The files in deploy/kubernetes/ are valid objects, and say what the command line and the routes say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from outrider.cli import build_parser
from outrider.commands.serve import KEY_VARIABLES, settings_of
from outrider.config import EngineConfig
from outrider.server.settings import ServerConfig

FILES = Path(__file__).parents[2] / "deploy" / "kubernetes"


def fields(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these fields and no others: a misspelt field would be dropped by the cluster without a word."""
    return {"type": "object", "properties": required | (optional or {}), "required": list(required),
            "additionalProperties": False}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
LABELS = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}
PROBE = fields({"httpGet": fields({"path": {"enum": ["/health", "/ready"]}, "port": TEXT}), "periodSeconds": COUNT,
                "timeoutSeconds": COUNT}, {"failureThreshold": COUNT})
ENV = {"oneOf": [fields({"name": TEXT, "value": TEXT}), fields({"name": TEXT, "valueFrom": fields(
    {"secretKeyRef": fields({"name": TEXT, "key": TEXT})})})]}
CONTAINER = fields(
    {"name": TEXT, "image": TEXT, "command": several(TEXT), "args": several(TEXT),
     "resources": fields({"requests": fields({"cpu": TEXT, "memory": TEXT}), "limits": fields(
         {"nvidia.com/gpu": TEXT})}),
     "volumeMounts": several(fields({"name": TEXT, "mountPath": TEXT}, {"readOnly": {"type": "boolean"}}))},
    {"env": several(ENV), "ports": several(fields({"name": TEXT, "containerPort": COUNT})), "startupProbe": PROBE,
     "livenessProbe": PROBE, "readinessProbe": PROBE})
VOLUME = fields({"name": TEXT}, {
    "emptyDir": fields({}, {"medium": {"enum": ["Memory"]}, "sizeLimit": TEXT}),
    "persistentVolumeClaim": fields({"claimName": TEXT}, {"readOnly": {"type": "boolean"}})})
POD = fields({"terminationGracePeriodSeconds": COUNT, "containers": several(CONTAINER), "volumes": several(VOLUME)},
             {"securityContext": fields({"runAsNonRoot": {"const": True}, "runAsUser": COUNT, "fsGroup": COUNT})})
RULE = fields({"ports": several(fields({"port": TEXT}))},
              {"from": several(fields({"podSelector": fields({"matchLabels": LABELS})}))})
META = fields({"name": TEXT}, {"labels": LABELS})
SCHEMAS = {
    "Deployment": fields({"apiVersion": {"const": "apps/v1"}, "kind": TEXT, "metadata": META, "spec": fields(
        {"replicas": COUNT, "selector": fields({"matchLabels": LABELS}),
         "template": fields({"metadata": fields({"labels": LABELS}), "spec": POD})})}),
    "LeaderWorkerSet": fields(
        {"apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"}, "kind": TEXT, "metadata": META, "spec": fields(
            {"replicas": COUNT, "leaderWorkerTemplate": fields(
                {"size": COUNT, "restartPolicy": {"const": "RecreateGroupOnPodRestart"},
                 "leaderTemplate": fields({"metadata": fields({"labels": LABELS}), "spec": POD}),
                 "workerTemplate": fields({"spec": POD}, {"metadata": fields({"labels": LABELS})})})})}),
    "NetworkPolicy": fields({"apiVersion": {"const": "networking.k8s.io/v1"}, "kind": TEXT, "metadata": META,
                             "spec": fields({"podSelector": fields({"matchLabels": LABELS}),
                                             "policyTypes": {"const": ["Ingress"]}, "ingress": several(RULE)})}),
    "Service": fields({"apiVersion": {"const": "v1"}, "kind": TEXT, "metadata": META, "spec": fields(
        {"selector": LABELS, "ports": several(fields({"name": TEXT, "port": COUNT, "targetPort": TEXT}))})}),
}


def objects(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file by their kind, each checked."""
    found = {}
    for each in yaml.safe_load_all((FILES / name).read_text()):
        jsonschema.validate(each, SCHEMAS[each["kind"]])
        found[each["kind"]] = each
    return found


def settings(words: list[str]) -> tuple[EngineConfig, ServerConfig]:
    return settings_of(build_parser().parse(words))[:2]


def check_pod(pod: dict[str, Any], labels: dict[str, str], service: dict[str, Any], engine: EngineConfig,
              config: ServerConfig) -> None:
    """A pod that serves HTTP agrees with the server's settings and with the Service in front of it."""
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.host == "0.0.0.0" and ports["http"] == config.port
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_timeout
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    assert service["spec"]["selector"].items() <= labels.items()
    probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["httpGet"]["path"] for probe in probes] == ["/health", "/health", "/ready"]
    assert all(probe["httpGet"]["port"] == "http" for probe in probes)
    names = {variable["name"] for variable in container["env"]}
    assert names & set(KEY_VARIABLES) and not [name for name in names if name.startswith("OUTRIDER_")
                                               and name not in KEY_VARIABLES]
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes and engine.model.startswith(mounts["models"])
    assert mounts["cache"] == "/cache", "where the container file has its caches"


def test_the_deployment_agrees_with_the_server() -> None:
    found = objects("deployment.yaml")
    template = found["Deployment"]["spec"]["template"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert container["command"][0] == "outrider"
    engine, config = settings([*container["command"][1:], *container["args"]])
    check_pod(template["spec"], template["metadata"]["labels"], found["Service"], engine, config)
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == engine.tensor_parallel_size * config.replicas
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    events = engine.kv_events
    assert events is not None and events.endpoint == f"tcp://*:{ports['kv-events']}"
    assert events.replay_endpoint == f"tcp://*:{ports['kv-replay']}" and not events.token_ids
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    open_ports, router_ports = ([port["port"] for port in rule["ports"]] for rule in policy["ingress"])
    assert open_ports == ["http"] and set(open_ports + router_ports) == ports.keys()
    assert ["from" in rule for rule in policy["ingress"]] == [False, True], "events are for the router alone"


def test_the_leader_starts_what_the_workers_join() -> None:
    found = objects("leader-worker-set.yaml")
    group = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    (first,), (second,) = leader["spec"]["containers"], worker["spec"]["containers"]
    head, serve = first["args"][0].split(" && exec ")
    words = shlex.split(serve)
    assert words[:2] == ["outrider", "serve"] and build_parser().parse(words[1:]).module == "ray.command"
    engine, config = settings(words[1:])
    check_pod(leader["spec"], leader["metadata"]["labels"], found["Service"], engine, config)
    (port,) = re.findall(r"--port=(\d+)", head)
    variables = {variable["name"]: variable.get("value") for variable in first["env"]}
    assert variables["RAY_ADDRESS"] == f"127.0.0.1:{port}"
    assert {"name": "ray", "containerPort": int(port)} in first["ports"]
    assert second["args"] == [f"exec ray start --address=$(LWS_LEADER_ADDRESS):{port} --block"]
    num_gpus = [int(each["resources"]["limits"]["nvidia.com/gpu"]) for each in (first, second)]
    places = sum(count // engine.tensor_parallel_size for count in [num_gpus[0], *num_gpus[1:] * (group["size"] - 1)])
    assert config.replicas == places, "every GPU of the group serves"
    assert first["image"] == second["image"], "versions on all nodes are equal"


@pytest.mark.parametrize(("path", "value"), [(("spec", "replica"), 2), (("spec", "replicas"), "two"),
                                             (("apiVersion",), "apps/v2")])
def test_the_schema_refuses_what_a_cluster_would_drop_or_refuse(path: tuple[str, ...], value: Any) -> None:
    made = objects("deployment.yaml")["Deployment"]
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, SCHEMAS["Deployment"])
