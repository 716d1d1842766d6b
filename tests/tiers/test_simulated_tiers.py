"""Simulated places predict the hits of a real engine with the same requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outrider.cache import load_choice
from outrider.cli import main
from outrider.commands.simulation_flags import DISK_HEAD, DISK_UNIT
from outrider.simulation.cluster import Cluster
from outrider.simulation.places import PlaceCosts
from outrider.simulation.router import LeastLoad
from outrider.simulation.trace import RecordedLoad, TracedRequest
from tests.engine.harness import Ask, Rig, greedy
from tests.tiers.rigs import KINDS, Kind, cache_of, stats_of
from tests.unit.made_costs import made_table

NUM_REQUESTS = 300
OUTPUT = 3


def conversations(vocab: int, most: int) -> list[tuple[int, ...]]:
    """Prompts of several turns, most of which continue one of the newest conversations."""
    draw = Random(5)
    prompts: list[tuple[int, ...]] = []
    while len(prompts) < NUM_REQUESTS:
        age = int(draw.expovariate(1 / 20)) + 1
        before = prompts[-age] if age <= len(prompts) and draw.random() < 0.7 else ()
        turn = tuple(draw.randrange(5, vocab) for _ in range(draw.randint(10, 35)))
        if len(before) + len(turn) <= most:
            prompts.append(before + turn)
    return prompts


def simulated(rig: Rig, places: tuple[PlaceCosts, ...], path: Path, prompts: list[tuple[int, ...]]) -> Any:
    info = replace(made_table().info, limits=rig.scheduler.limits, layout=cache_of(rig).layout,
                   num_pages=cache_of(rig).pool.num_pages, lookahead=cache_of(rig).lookahead)
    table = replace(made_table(), info=info, places=places)
    path.write_text("".join(json.dumps({"arrival": 100.0 * number, "prompt_token_ids": prompt, "output_tokens": OUTPUT})
                            + "\n" for number, prompt in enumerate(prompts)))
    cluster = Cluster(table, 1, LeastLoad())
    summary = cluster.run(RecordedLoad(path)).summary()
    (replica,) = cluster._replicas
    replica.scheduler.check_integrity()
    return summary


@pytest.mark.parametrize("name", ["full", "full and sliding", "gated delta"])
def test_hits_are_those_of_a_real_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_choice, "LEAST_TOKENS", 1 << 60)  # simulations load whatever they find
    kind: Kind = KINDS[name]
    prompts = conversations(kind.vocab, 90)
    with kind.open(tmp_path, num_pages=24) as rig:
        page = rig.step.pool.layout.page_bytes
    taken = -(-(page + DISK_HEAD) // DISK_UNIT) * DISK_UNIT
    host, disk = 40 * page, max(1 << 20, 120 * taken)
    with kind.open(tmp_path, num_pages=24, host_cache_memory=host, disk_cache_dir=str(tmp_path / "cache"),
                   disk_cache_size=disk) as rig:
        places = PlaceCosts("host", host, 1e9), PlaceCosts("disk", disk, 1e8, DISK_UNIT, DISK_HEAD)
        predicted = simulated(rig, places, tmp_path / "trace.jsonl", prompts)
        rig.run_one_by_one([Ask(list(prompt), greedy(OUTPUT)) for prompt in prompts])
        stats, loaded = rig.scheduler.cache.stats, stats_of(rig).num_loaded
        real = stats.hit_tokens / stats.queried_tokens
        alone = simulated(rig, (), tmp_path / "trace.jsonl", prompts)["prefix_hit_rate"]
    assert predicted["prefix_hit_rate"] == pytest.approx(real, abs=0.03)
    assert predicted["prefix_hit_rate"] > alone + 0.05, "the places make no difference"
    assert set(predicted["loaded_pages"]) == {"host", "disk"} == set(loaded)


def test_a_load_takes_the_time_of_its_bytes(tmp_path: Path) -> None:
    prompt = tuple(range(3, 84))
    table = made_table(num_pages=16)
    page = table.info.layout.page_bytes
    requests = [TracedRequest(0.0, 81, 2, given_ids=prompt), TracedRequest(10.0, 200, 2), TracedRequest(20.0, 200, 2),
                TracedRequest(30.0, 81, 2, given_ids=prompt)]
    times = []
    for bandwidth in (1e12, 10 * page):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(
            {"arrival": own.arrival, "output_tokens": 2} | ({"prompt_token_ids": own.given_ids} if own.given_ids else
                                                            {"prompt_tokens": own.prompt_len})) + "\n"
            for own in requests))
        cluster = Cluster(replace(table, places=(PlaceCosts("host", 1 << 30, bandwidth),)), 1, LeastLoad())
        outcome = cluster.run(RecordedLoad(path))
        assert outcome.loaded_pages == {"host": 5}
        times.append(outcome.first_token[-1])
    assert times[1] - times[0] == pytest.approx(5 / 10, abs=0.02)


def test_flags_name_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    made_table(num_pages=60).save(path)
    flags = ["simulate", str(path), "--rate", "5", "--num-requests", "60", "--prefixes", "9", "--prefix-len", "300",
             "--input-len", "20", "--output-len", "4"]
    rates = []
    for more in ((), ("--tier", "disk:1GiB:5", "--tier", "host:1MiB:50")):
        assert main([*flags, *more]) == 0
        (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        rates.append(row["prefix_hit_rate"])
    assert rates[1] > rates[0] + 0.1 and row["loaded_pages"]["disk"]
    for wrong in ("host", "tape:1GiB:5", "host:1GiB:fast", "host:0:5"):
        assert main([*flags, "--tier", wrong]) == 2
    assert main([*flags, "--tier", "host:1GiB:5", "--tier", "host:1GiB:5"]) == 2
    assert "at most once" in capsys.readouterr().err
