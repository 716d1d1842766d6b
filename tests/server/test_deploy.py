"""The files in deploy/ say what the code says: settings, paths and names of metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outrider.cli import build_parser
from outrider.commands.parser import engine_config
from outrider.commands.serve import apply_file, server_config
from tests.compat import container
from tests.server.rig import serving

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_settings_are_settings() -> None:
    args = build_parser().parse_args(["serve", "--config", str(DEPLOY / "server.yaml")])
    apply_file(args, DEPLOY / "server.yaml")
    assert server_config(args).request_timeout == 600 and engine_config(args).model == "smollm2"


def test_the_container_copies_what_is_there() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    sources = [name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert sources and all((DEPLOY.parent / name).exists() for name in sources)
    assert "ARG EXTRAS=server\n" in text and '".[$EXTRAS]"' in text
    assert re.search(r"^USER outrider$", text, re.MULTILINE)


@pytest.mark.long
def test_the_steps_of_the_container_file_make_a_server(tmp_path: Path) -> None:
    container.run(tmp_path)


def test_the_unit_waits_longer_than_the_server_drains() -> None:
    unit = (DEPLOY / "outrider.service").read_text()
    seconds = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert seconds is not None and int(seconds[1]) > 30 and "--config /etc/outrider/server.yaml" in unit


def test_every_metric_of_the_grafana_dashboard_is_there() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    wanted = {name for text in expressions for name in re.findall(r"vllm:(\w+)", text)}
    with serving() as served:
        assert served.post("/v1/completions", prompt="abab" * 8, max_tokens=20, temperature=0).status_code == 200
        served.assert_idle()
        found = set(re.findall(r"^vllm:(\w+)", served.http.get("/metrics").text, re.MULTILINE))
    assert len(wanted) > 15 and not wanted - found
