"""Simulated engines: their times by hand, many turns at once against one by one, loads, routers, ranks and files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.commands.simulated_routing import ROUTERS, ServedPolicy
from outrider.core.costs import ReadCost
from outrider.features.adapters.limits import AdapterLimits
from outrider.simulation.cluster import Cluster
from outrider.simulation.cost_table import CostTable, HostCosts, PromptSteps
from outrider.simulation.ranks import Link, over_ranks
from outrider.simulation.router import LeastLoad, RoundRobin
from outrider.simulation.trace import (
    ClosedLoad,
    FixedLength,
    Load,
    LognormalLength,
    OpenLoad,
    RecordedLoad,
    Shapes,
    SharedPrefixes,
    TracedRequest,
    parse_lengths,
)
from tests.unit.made_costs import FULL, STATE, WINDOW, made_table

NO_HOST = HostCosts(0.0, 0.0)


def mixed_shapes(num_prefixes: int = 0) -> Shapes:
    prefixes = SharedPrefixes(num_prefixes, 64) if num_prefixes else None
    return Shapes(LognormalLength(80, 0.8, 600), LognormalLength(40, 0.8, 300), prefixes, seed=1, most=1900)


def simulate(table: CostTable, load: Load, num_replicas: int = 1, router: str = "least-load",
             skips: bool = True) -> tuple[dict[str, Any], list[Any]]:
    """The summary, and the content of every replica's pages at the end."""
    cluster = Cluster(table, num_replicas, ROUTERS[router](), skips=skips)
    summary = cluster.run(load).summary()
    for replica in cluster._replicas:
        replica.scheduler.check_integrity()
        assert not replica.scheduler.has_work and not replica.load
    return summary, [replica.scheduler.cache.pool._page_of for replica in cluster._replicas]


# Times by hand

def test_one_request_takes_the_times_of_its_steps() -> None:
    table = made_table(host=NO_HOST, reading=(), attending=())
    summary, _ = simulate(table, ClosedLoad(Shapes(FixedLength(16), FixedLength(11), None, 0, 100), 1, 1))
    assert summary["mean_ttft_ms"] == pytest.approx(5.0)
    assert summary["mean_e2el_ms"] == pytest.approx(5.0 + 10 * 4.0)
    assert summary["p99_itl_ms"] == pytest.approx(4.0)
    assert summary["output_throughput"] == pytest.approx(11 / 0.045)


def test_contexts_and_the_host_add_their_time() -> None:
    table = made_table(host=HostCosts(1e-3, 1e-3, 5e-3), reading=(ReadCost(None, 1e-4),), attending=(), depth=1)
    summary, _ = simulate(table, ClosedLoad(Shapes(FixedLength(16), FixedLength(2), None, 0, 100), 1, 1))
    assert summary["mean_ttft_ms"] == pytest.approx(5.0 + 5.0 + 2.0)
    assert summary["mean_itl_ms"] == pytest.approx(4.0 + 17 * 0.1 + 2.0)


def test_captured_steps_with_prompts_take_the_time_of_the_next_larger_size() -> None:
    steps = PromptSteps(0, (64, 128, 256), (5e-3, 6e-3, 9e-3), padded_up_to=128)
    assert [steps.step(tokens) for tokens in (10, 64, 65, 128)] == [5e-3, 5e-3, 6e-3, 6e-3]
    assert steps.step(192) == pytest.approx(7.5e-3) and steps.step(384) == pytest.approx(12e-3)


def test_steps_with_prompts_take_the_times_of_their_number_of_requests() -> None:
    few, many = PromptSteps(0, (16, 512), (5e-3, 20e-3), requests=2), PromptSteps(0, (16, 512), (9e-3, 24e-3))
    table = made_table(host=NO_HOST, reading=(), attending=(), prompts=(few, many))
    for num_requests, seconds in ((1, 5.0), (2, 5.0 + 15 / 31), (3, 9.0 + 30 / 31)):
        load = ClosedLoad(Shapes(FixedLength(16), FixedLength(1), None, 0, 100), num_requests, num_requests)
        assert simulate(table, load)[0]["mean_ttft_ms"] == pytest.approx(seconds)
    drafted = replace(table, prompts=(few, many, replace(few, num_drafts=2), replace(many, num_drafts=2)))
    assert drafted.prompt_steps(2, proposes=True).num_drafts == 2 == drafted.prompt_steps(99, proposes=True).num_drafts
    with pytest.raises(ValueError, match="prompts must be sorted by num_drafts and requests"):
        replace(table, prompts=(many, few)).check()


def test_drafts_that_are_all_accepted_shorten_answers() -> None:
    load = Shapes(FixedLength(16), FixedLength(61), None, 0, 100)
    plain, _ = simulate(made_table(max_drafts=2, acceptance=(0.0,)), ClosedLoad(load, 1, 1))
    drafted, _ = simulate(made_table(max_drafts=2, acceptance=(1.0,)), ClosedLoad(load, 1, 1))
    assert drafted["drafts"]["mean_run"] > 2.5 and drafted["drafts"]["most_chosen_by_requests"] == {"1": 2}
    assert drafted["mean_e2el_ms"] < 0.6 * plain["mean_e2el_ms"]


def test_acceptance_is_drawn_at_the_rates() -> None:
    table = made_table(max_drafts=2, acceptance=(0.6,))
    table = replace(table, info=replace(table.info, drafting=replace(table.info.drafting, always_propose=True)))
    summary, _ = simulate(table, ClosedLoad(Shapes(FixedLength(16), FixedLength(400), None, 0, 600), 16, 4))
    # Of two drafts, 0.6 of the first and 0.36 of the second are accepted.
    assert summary["drafts"]["acceptance_rate"] == pytest.approx(0.48, abs=0.03)


# Many turns at once

TABLES = {
    "plain": lambda: made_table(), "windows": lambda: made_table((FULL, WINDOW)),
    "one step in flight": lambda: made_table(depth=1, submits_early=True),
    "no overlap": lambda: made_table(depth=1), "bounded steps": lambda: made_table(bounds_steps=True),
    "few pages": lambda: made_table(num_pages=60, max_requests=6),
    "slow host": lambda: made_table(host=HostCosts(5e-3, 1e-4, latency=1e-3)),
    "two parts": lambda: made_table(reading=(ReadCost(None, 1e-7), ReadCost(90, 1e-6))),
    "windows read": lambda: made_table((FULL, WINDOW), reading=(ReadCost(None, 1e-7), ReadCost(48, 1e-6))),
    "drafts": lambda: made_table(max_drafts=2), "states": lambda: made_table((FULL, STATE)),
}


@pytest.mark.parametrize("name", TABLES)
def test_turns_made_together_leave_what_they_leave_one_by_one(name: str) -> None:
    table = TABLES[name]()
    loads = (lambda: OpenLoad(mixed_shapes(3), 24, rate=12.0), lambda: ClosedLoad(mixed_shapes(), 16, 5))
    for load, num_replicas in zip(loads, (2, 1), strict=True):
        together, one_by_one = (simulate(table, load(), num_replicas, "prefix", skips) for skips in (True, False))
        assert together == one_by_one


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", TABLES)
def test_random_loads_end_alike_whether_turns_are_made_together(name: str, seed: int) -> None:
    table = TABLES[name]()

    def load() -> Load:
        shapes = Shapes(LognormalLength(60, 1.0, 500), LognormalLength(50, 1.0, 400), SharedPrefixes(4, 48), seed, 1900)
        if seed % 3 == 0:
            return ClosedLoad(shapes, 60, 1 + seed % 11)
        return OpenLoad(shapes, 60, 4.0 + 2 * seed, burst=1 + seed % 4, seed=seed)

    router = tuple(ROUTERS)[seed % len(ROUTERS)]
    together, one_by_one = (simulate(table, load(), 1 + seed % 3, router, skips) for skips in (True, False))
    assert together == one_by_one


def test_preempted_requests_are_counted_and_end() -> None:
    table = made_table(num_pages=40, max_requests=6)
    summary, _ = simulate(table, ClosedLoad(Shapes(FixedLength(100), FixedLength(150), None, 0, 600), 12, 6))
    assert summary["completed"] == 12 and summary["preemptions"] > 0 and summary["max_page_use"] > 0.9


# Loads

def test_shared_prefixes_hit_and_those_drawn_most_are_the_first() -> None:
    shapes = Shapes(FixedLength(16), FixedLength(4), SharedPrefixes(1, 64), 0, 900)
    summary, _ = simulate(made_table(), ClosedLoad(shapes, 20, 1))
    assert summary["prefix_hit_rate"] == pytest.approx(0.95 * 64 / 80)
    drawn = [ask.prefix for ask in OpenLoad(mixed_shapes(50), 2000, 1.0).arrivals()]
    assert drawn.count(0) > 3 * drawn.count(9) > 0


def test_bursts_arrive_together_at_the_same_rate() -> None:
    times = [ask.arrival for ask in OpenLoad(mixed_shapes(), 4000, 10.0, burst=8).arrivals()]
    assert times[-1] == pytest.approx(400, rel=0.15) and len(set(times)) == 500


def test_a_recorded_load_names_prompts_and_prefixes(tmp_path: Path) -> None:
    lines = [{"arrival": 2.0, "prompt_tokens": 100, "output_tokens": 5, "prefix": "a", "prefix_tokens": 64},
             {"arrival": 1.0, "prompt_token_ids": [1, 2, 3], "output_tokens": 7},
             {"arrival": 3.0, "prompt_tokens": 100, "output_tokens": 5, "prefix": "a", "prefix_tokens": 64}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\r\n".join(map(json.dumps, lines)), newline="")
    first, second, third = RecordedLoad(path).arrivals()
    assert first.token_ids(0) == (1, 2, 3) and (first.arrival, first.output_len) == (1.0, 7)
    assert second.token_ids(1)[:64] == third.token_ids(2)[:64] and second.token_ids(1)[64:] != third.token_ids(2)[64:]


def test_names_in_a_trace_may_hold_line_separators_that_json_allows(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    names = ["a\u2028b", "a\x85b", "a\u2029b"]
    path.write_text("".join(json.dumps({"prompt_tokens": 9, "output_tokens": 1, "prefix": name, "prefix_tokens": 5},
                                       ensure_ascii=False) + "\n" for name in names), encoding="utf-8")
    assert [ask.prefix for ask in RecordedLoad(path).arrivals()] == [0, 1, 2]


@pytest.mark.parametrize("line", ['{"prompt_tokens": 5}', "[]", '{"prompt_tokens": 5, "output_tokens": 0}',
                                  '{"prompt_tokens": 5, "output_tokens": 2, "prefix_tokens": 9}',
                                  '{"prompt_tokens": 5, "output_tokens": 2, "arrival": Infinity}',
                                  '{"prompt_tokens": Infinity, "output_tokens": 2}', "[" * 100_000,
                                  '{"prompt_tokens": 5.9, "output_tokens": 2}',
                                  '{"prompt_tokens": 5, "output_tokens": true}',
                                  '{"prompt_token_ids": "123", "output_tokens": 2}',
                                  '{"prompt_token_ids": [1, 99999999999999999999], "output_tokens": 2}',
                                  '{"prompt_token_ids": [], "output_tokens": 2}',
                                  '{"prompt_tokens": 5, "output_tokens": 2, "prefix_tokens": 3}'])
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_tokens": 5, "output_tokens": 2}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        RecordedLoad(path)


@pytest.mark.parametrize("text", ["0", "x", "lognormal:5", "lognormal:0:1", "lognormal:5:inf", "2000"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        parse_lengths(text, 1000)


# Routers

def test_routers_choose_by_turns_by_load_and_by_prefix() -> None:
    assert [RoundRobin().choose([5, 0, 0], None)] == [0]
    assert LeastLoad().choose([3, 1, 2], None) == 1
    affinity = ServedPolicy()
    home = affinity.choose([0, 0, 0], "a")
    assert affinity.choose([9 if index == home else 8 for index in range(3)], "a") == home
    loads = [40 if index == home else 1 for index in range(3)]
    moved = affinity.choose(loads, "a")
    # Both have the beginning now, and the third does not.
    loads = [4 if index in (home, moved) else 3 for index in range(3)]
    assert moved != home and affinity.choose(loads, "a") in (home, moved)


def test_prefix_affinity_hits_more_than_round_robin() -> None:
    shapes = (FixedLength(16), FixedLength(8), SharedPrefixes(6, 160), 0, 900)
    by_turns, by_prefix = (simulate(made_table(num_pages=90), OpenLoad(Shapes(*shapes), 120, 20.0), 4, router)[0]
                           for router in ("round-robin", "prefix"))
    assert by_prefix["prefix_hit_rate"] > by_turns["prefix_hit_rate"] + 0.1


# Ranks

def test_ranks_share_the_work_and_pay_for_sums() -> None:
    table, link = made_table(bounds_steps=True, max_drafts=1), Link(4e11, 1e-5)
    shared = over_ranks(table, 4, link)
    work, sums = (8 << 30) / 4e12, 2 * 4 * (1e-5 + 1.5 * 1024 * 2 / 4e11)
    assert shared.decode(1, 0) == pytest.approx(4e-3 - work * 3 / 4 + sums)
    assert shared.reading[0].seconds == pytest.approx(table.reading[0].seconds / 4)
    assert shared.info.num_pages > 4 * table.info.num_pages
    assert over_ranks(table, 1, link) is table


# Files and the command

def test_a_cost_table_comes_back_from_its_file(tmp_path: Path) -> None:
    table = made_table((FULL, WINDOW, STATE), max_drafts=2, bounds_steps=True)
    table.save(tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json") == table


def test_sizes_of_features_are_left_out_of_a_cost_table(tmp_path: Path) -> None:
    table = made_table((FULL,))
    limits = replace(table.info.limits, parts=(AdapterLimits(2, 3, 4),))
    replace(table, info=replace(table.info, limits=limits)).save(tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json") == table


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for text, message in (("[1]", "is not a cost table"), ("{", "cannot be read"),
                          ('{"format": "outrider costs 1", "is": "Popen"}', "has the unknown type"),
                          ('{"format": "outrider costs 1", "is": "Limits", "x": 1}', "differs from this version")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            CostTable.read(path)


@pytest.mark.parametrize(("place", "value", "message"), [
    (("host", "step"), "0.1", "HostCosts: step must be a number"),
    (("host", "step"), -0.1, "HostCosts: step must be"),
    (("host", "request"), float("nan"), "HostCosts: request must be"),
    (("model", "bandwidth"), 0, "ModelFacts: bandwidth must be"),
    (("model",), None, "CostTable: model must be a ModelFacts"),
    (("prompts", 0, "num_drafts"), 5, "num_drafts must be 0 or"),
    (("info", "layout", "groups"), [], "groups must not be empty"),
    (("info", "layout", "groups", 0, "page_tokens"), 0, "page_tokens of a group must be at least 1"),
    (("acceptance",), [1.5], "CostTable: acceptance must be"),
    (("decoding",), [], "one entry for each num_drafts"),
    (("decoding", 0, "requests"), [8, 1, 64], "decoding with 0 drafts: requests must be rising numbers"),
    (("decoding", 0, "seconds"), [0.1], "as many seconds"),
    (("prompts", 0, "tokens"), [], "prompts with 0 drafts: tokens must be rising numbers"),
    (("prompts", 0, "padded_up_to"), 4096, "padded_up_to"),
    (("prompts",), [], "prompts must not be empty"),
    (("reading", 0, "seconds"), -1, "reading: seconds"),
    (("reading", 0, "window"), 1.5, "ReadCost: window must be"),
    (("info", "limits", "max_requests"), 0, "limits: max_requests must be at least 1"),
    (("info", "limits", "max_len"), "long", "Limits: max_len must be an integer"),
    (("info", "num_pages"), 1, "num_pages must be"),
    (("info", "drafting", "costs", "tokens"), [1], "drafting: tokens must be rising numbers"),
    (("info", "prompt_steps", "costs", "seconds"), [1], "prompt_steps: tokens must be rising numbers"),
    (("info", "layout"), [], "WorkerInfo: layout must be a CacheLayout"),
    (("info", "layout", "places", "items"), [[1]], "list of .key, value. pairs"),
])
def test_an_edited_table_is_refused_when_it_is_read(tmp_path: Path, place: tuple[Any, ...], value: Any,
                                                    message: str) -> None:
    path = tmp_path / "costs.json"
    made_table((FULL, WINDOW), max_drafts=2, bounds_steps=True).save(path)
    content = part = json.loads(path.read_text())
    for name in place[:-1]:
        part = part[name]
    assert place[-1] in part or isinstance(part, list)
    part[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"costs.json is not a usable cost table: .*{message}"):
        CostTable.read(path)


def test_the_command_prints_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_table().save(tmp_path / "costs.json")
    words = ["simulate", str(tmp_path / "costs.json"), "--rate", "5,20", "--replicas", "1,2", "--num-requests", "20"]
    assert main([*words, "--input-len", "lognormal:50:0.5", "--output-len", "20", "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert [(row["replicas"], row["load"]) for row in result["rows"]] == [(1, 5), (1, 20), (2, 5), (2, 20)]
    assert "more than can be served" not in printed
    assert all(row["completed"] == 20 for row in result["rows"])
    assert main(words[:2]) == 2 and "--concurrency" in capsys.readouterr().err
    for flag, value in (("--rate", "inf"), ("--rate", "1e-320"), ("--front-ms", "nan"), ("--link-gb-s", "nan"),
                        ("--link-us", "inf"), ("--zipf", "-1000"), ("--zipf", "nan")):
        assert main([*words, flag, value]) == 2 and flag in capsys.readouterr().err
    assert main([*words, "--input-len", "9999"]) == 2 and "is not a length" in capsys.readouterr().err


def test_the_command_names_loads_that_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Waits then grow with the number of requests; they are printed in whole milliseconds."""
    made_table().save(tmp_path / "costs.json")
    words = ["simulate", str(tmp_path / "costs.json"), "--rate", "1,4000", "--num-requests", "400"]
    assert main([*words, "--input-len", "500", "--output-len", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "more than can be served" in line] == ["replicas 1, load 4000"]
    names, low, high = (line.split() for line in lines[:3])
    assert len(low) == len(high) == len(names) and not any("e+" in number for number in high)


def test_what_cannot_be_written_is_told_before_anything_is_simulated(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made_table().save(tmp_path / "costs.json")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # its import fails
    words = ["simulate", str(tmp_path / "costs.json"), "--rate", "5", "--num-requests", "5", "--input-len", "9"]
    for flag, message in (("--plot", "needs matplotlib"), ("--save-result", "there is no folder")):
        assert main([*words, flag, str(tmp_path / "none" / "name")]) == 2
        shown = capsys.readouterr()
        assert message in shown.err and not shown.out


def test_a_request_keeps_its_tokens_apart_from_others() -> None:
    assert not set(TracedRequest(0.0, 50, 1).token_ids(1)) & set(TracedRequest(0.0, 50, 1).token_ids(2))
