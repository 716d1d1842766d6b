"""What benchmarks say beside the time: the bytes of a step, the floor, experts taken, and routing that spreads them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.benchmarks import roofline
from outrider.benchmarks.prompt_work import PromptWork, visible_pairs
from outrider.benchmarks.roofline import Decoding, Traffic, mean_context
from outrider.benchmarks.throughput import BestSpeed, _decoding
from outrider.cli import main
from outrider.commands import env
from outrider.config import EngineConfig
from outrider.kernels.moe import RouteRule
from outrider.layers import Linear, find_modules
from outrider.layers.router import ExpertTally, Router, SpreadRouting
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from outrider.runner.cache_plan import plan_cache
from outrider.runner.graphs import costs
from tests.engine.harness import CONFIGS
from tests.models.oracle import make_folder

CPU = torch.device("cpu")
CONFIGURED = Path(__file__).parents[2] / "bench" / "configs"


def meta_model(config: dict[str, Any]) -> Any:
    return build_model(config, dtype=torch.bfloat16, device="meta")


def routers(*indices: int, experts: int = 16, top_k: int = 3) -> list[Router]:
    return [Router(i, 4, RouteRule(experts, top_k), dtype=torch.float32, device=CPU) for i in indices]


def test_bandwidth_of_a_cpu_is_that_of_its_fastest_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "CPU_BYTES", 1 << 20)
    clock = iter([0.0, 3.0] * 3 + [10.0, 12.0] + [20.0, 29.0] * 3)
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=clock.__next__))
    assert roofline.measure_bandwidth(CPU) == (1 << 20) / 2.0


def test_mean_context_is_the_mean_over_the_answers_steps() -> None:
    for prompt, outputs, window in ((9, 20, 15), (30, 4, 15), (3, 5, 100), (14, 1, 15), (1, 40, 1)):
        seen = [min(prompt + t, window) for t in range(1, outputs + 1)]
        assert mean_context(prompt, outputs, window) == pytest.approx(sum(seen) / outputs)
    assert mean_context(128, 256, None) == 256.5


def test_bytes_of_a_dense_model() -> None:
    traffic = Traffic(meta_model(read_config(CONFIGURED / "llama8b")))
    # Everything but the embedding, of which a token reads one row.
    assert traffic.weights.dense == 2 * (8_030_261_248 - 128256 * 4096) and traffic.row_bytes == 2 * 4096
    work = Decoding([(128, 256)] * 8)
    cache = 8 * 256 * 256.5 * 32 * 2 * 8 * 128 * 2
    assert traffic.total(work) == pytest.approx(256 * traffic.weights.dense + 8 * 256 * traffic.row_bytes + cache)
    alone = traffic.floor(Decoding([(128, 256)]), 4.4e12)
    assert 285 < alone < 295, "3.4 ms a step"
    assert traffic.floor(Decoding([(128, 256)], mean_run=2.5), 4.4e12) == pytest.approx(2.5 * alone, rel=0.01)


def test_bytes_of_windows_experts_and_states() -> None:
    sliding = Traffic(meta_model(CONFIGS["sliding"])).total(Decoding([(60, 8)]))
    full = Traffic(meta_model(CONFIGS["llama"])).total(Decoding([(60, 8)]))
    assert full - sliding == pytest.approx(8 * 2 * (64.5 - 20) * 2 * 2 * 8 * 2)
    nemotron = Traffic(meta_model(read_config(CONFIGURED / "nemotronh-15b-a2b")))
    few, all_of_them = (nemotron.total(Decoding([(1, 1)], distinct_experts=n)) for n in (6, 128))
    layers, (count, size) = len(nemotron.weights.experts), nemotron.weights.experts[0]
    assert count == 128 and all_of_them - few == pytest.approx(layers * 122 * size)
    # At batch 64 with spread routing another count of the same gives 8470 tokens per second.
    taken = 128 * (1 - (1 - 6 / 128) ** 64)
    floor = nemotron.floor(Decoding([(128, 256)] * 64, distinct_experts=taken), 4.4e12)
    assert 8000 < floor < 9000


def test_bytes_of_a_cache_in_fp8() -> None:
    """The one layer without a window saves a byte for each number."""
    model, work = meta_model(CONFIGS["gemma3"]), Decoding([(60, 8)])
    config = EngineConfig("m", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("sliding_window",))
    saved = Traffic(model).total(work) - Traffic(model, layout=plan_cache(config, model)).total(work)
    assert saved == pytest.approx(8 * 1 * 64.5 * 2 * 2 * 16)


def test_spread_routing_draws_distinct_experts_evenly_and_anew() -> None:
    spread = SpreadRouting(routers(1, 4), device=CPU)
    tally = ExpertTally(routers(1, 4), 10, device=CPU)
    seen = torch.zeros(16, dtype=torch.int64)
    draws = []
    for _ in range(100):
        for index in (1, 4):
            ids = spread(index, 10)
            assert ids.shape == (10, 3) and ids.dtype == torch.int64 and 0 <= int(ids.min()) <= int(ids.max()) < 16
            assert all(len(set(row)) == 3 for row in ids.tolist())
            seen += ids.flatten().bincount(minlength=16)
            draws.append(ids.clone())
            tally(index, ids)
    tally(1, torch.zeros(11, 3, dtype=torch.int64))  # a prompt
    assert len({tuple(ids.flatten().tolist()) for ids in draws}) == 200, "by layer and by step"
    assert 0.7 < float(seen.min() / seen.max())
    mean = tally.mean()
    assert mean is not None and mean == pytest.approx(16 * (1 - (13 / 16) ** 10), rel=0.05)
    assert spread(4, 3).shape == (3, 3), "a drafter's pass has token rows of its own"
    assert ExpertTally(routers(1), 1, device=CPU).mean() is None
    with pytest.raises(ValueError, match="same number of experts"):
        SpreadRouting([*routers(0), *routers(1, experts=8)], device=CPU)


def test_decoding_is_timed_while_all_requests_decode() -> None:
    """Two tokens every 10 ms from 1 s on, and every 100 ms before, while another request's prompt is computed. One step
    that takes longer, as a first capture does, changes nothing."""
    early = [(0.1 * i, i) for i in range(10)] + [(1 + 0.01 * i, 10 + 2 * i) for i in range(9)] + [(1.5, 28)]
    late = [(1 + 0.01 * i, 1 + i) for i in range(9)] + [(1.5, 10), (1.6, 30)]
    assert list(_decoding([early, late])) == pytest.approx([0.005, 0.01])
    assert not list(_decoding([[(0.0, 1), (0.1, 2)], [(1.0, 1)]])), "never at the same time"


def test_operations_of_prompts() -> None:
    llama = PromptWork(meta_model(read_config(CONFIGURED / "llama8b")))
    assert llama.token_operations == 2 * 32 * 4096 * (6144 + 4096 + 3 * 14336)
    pairs = 100 * 101 // 2 + 7 * 8 // 2
    assert llama.total([100, 7]) == 107 * llama.token_operations + 32 * 4 * 32 * 128 * pairs
    for length, window in ((20, 5), (5, 20), (7, 7), (9, None)):
        seen = sum(min(position + 1, window or length) for position in range(length))
        assert visible_pairs(length, window) == seen
    assert visible_pairs(20, 6, is_chunked=True) == sum(position % 6 + 1 for position in range(20))
    hybrid = meta_model(read_config(CONFIGURED / "nemotronh-15b-a2b"))
    linears = [linear for linear in find_modules([hybrid], Linear) if linear is not hybrid.lm_head]
    dense = sum(linear.in_features * linear.out_features for linear in linears)
    chosen = 11 * 6 * 2 * 2688 * 1856  # in eleven layers, six experts of two products
    assert PromptWork(hybrid).token_operations == 2 * (dense + chosen)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 2), (5, 5), (6, 4)])
def test_spread_routing_serves_any_number_of_experts(experts: int, top_k: int) -> None:
    ids = SpreadRouting(routers(0, experts=experts, top_k=top_k), device=CPU)(0, 40)
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_a_processor_known_by_numbers_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "lscpu"
    tool.write_text("#!/bin/sh\necho 'Model name:   Cortex-A53'\necho '  Model name:   Cortex-A73'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert env._listed_cpu_name() == "Cortex-A53 and Cortex-A73"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert env._listed_cpu_name() == "" and env.cpu_name()


def test_the_best_speed_is_measured_again_before_it_is_exceeded() -> None:
    looks = iter([10.0, 5.0, 30.0])
    speed = BestSpeed(lambda: next(looks))
    speed.measure()
    assert speed.share(5.0) == 0.5 and speed.share(12.0) == 1.2 and speed.share(15.0) == 0.5 and speed.best == 30.0


def test_bench_prints_floor_and_experts_and_saves_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder("qwen3_moe", tmp_path / "m")
    flags = ["--shapes", "6x9x12", "--num-pages", "99", "--rounds", "1", "--routing", "spread"]
    assert main(["bench", "throughput", str(folder), *flags, "--save-result", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report == json.loads((tmp_path / "r.json").read_text()) and "prompts are not counted" in out
    assert report["routing"] == "spread" and "experts were drawn" in out
    assert report["bandwidth_gb_s"] > 0 and report["card"] and report["date"] and report["versions"]["torch"]
    (row,) = report["results"]
    assert 0 < row["prompts_s"] <= row["s"] + 0.001 and 0 <= row["of_product"] < 1
    assert row["prompt_tflop_s"] > 0 and report["product_tflop_s"] > 0, "digits enough for a tiny model"
    assert all(f"{name}: " in out for name in ("first_s", "of_first", "step_mb", "floor_tok_s", "of_product"))
    assert row["first_s"] == row["s"] and row["of_first"] == 1, "one round"
    assert 6 < row["distinct_experts"] <= 8  # of 8, by 6 token rows of 3
    assert row["floor_tok_s"] > 0 and row["of_floor"] == pytest.approx(row["out_tok_s"] / row["floor_tok_s"], abs=0.01)


def test_routing_is_refused_where_it_means_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--routing", "spread", "--prompt", "x"]) == 2
    assert "--routing is for `outrider bench" in capsys.readouterr().err
    folder = make_folder("llama", tmp_path / "m")
    assert main(["bench", "throughput", str(folder), "--routing=spread", "--num-pages", "9", "--shapes", "1x4x4"]) == 2
    assert "no experts" in capsys.readouterr().err
    assert main(["bench", "throughput", str(folder), "--save-result", str(tmp_path / "no" / "file")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_results_are_drawn_with_and_without_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from bench import plot_results

    results = Path(__file__).parents[2] / "bench/results"
    report = json.loads((results / "h200.json").read_text())
    report["series"][0]["rows"][0]["floor"] = 2000
    report["series"].append({"name": "spread", "rows": [{"batch": 1, "tok_s": 5.0, "floor": 9.0}]})
    for name in ("bench/results", "docs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bench/results/h200.json").write_text(json.dumps(report))
    (tmp_path / "bench/results/spec_cpu.json").write_text((results / "spec_cpu.json").read_text())
    monkeypatch.setattr(plot_results, "ROOT", tmp_path)
    plot_results.main()
    for name in ("h200", "spec_cpu"):
        assert (tmp_path / f"docs/{name}.svg").stat().st_size > 1000
    assert not list((tmp_path / "docs").glob("*.png")), "pages show the drawings, and pictures would lie beside them"


def test_results_of_a_run_are_collected_beside_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from bench import collect_results

    results = Path(__file__).parents[2] / "bench/results"
    for name in ("h200.json", "peer.json"):
        (tmp_path / name).write_text((results / name).read_text())
    cases = [{"case": "8x128x256", "out_tok_s": 5.0, "floor_tok_s": 9.0}, {"case": "nano", "out_tok_s": 3.0,
                                                                          "floor_tok_s": 4.0}]
    run = {"results": cases, "date": "2031-01-01", "card": "a card", "versions": {"torch": "9"}, "start_s": 1.5,
           "process_s": 2.5, "speculative_config": None, "routing": "learned"}
    (tmp_path / "out").mkdir()
    (tmp_path / "out/qwen06b.json").write_text(json.dumps(run))
    monkeypatch.setattr(collect_results, "RESULTS", tmp_path)
    collect_results.main(tmp_path / "out")
    before = json.loads((results / "h200.json").read_text())
    report = json.loads((tmp_path / "h200.json").read_text())
    assert report["card"] == "a card" and report["series"][1:] == before["series"][1:], "the others stay"
    assert report["series"][0]["rows"] == [{"tok_s": 5.0, "floor": 9.0, "batch": 8, "peer": 3857}]
    assert {"tok_s": 3.0, "floor": 4.0, "model": "qwen06b", "case": "nano", "peer": 23152} in report["others"]


def test_the_table_of_the_document_is_that_of_the_results() -> None:
    """Tokens per second by batch, here and of the peer, of every series that has a peer."""
    root = Path(__file__).parents[2]
    text = (root / "docs/benchmarks.md").read_text()
    rows = re.findall(r"^\| ([^|(]+?)(?: \([^|]*\))? \| ([\d/]+) \| ([\d/]+) \|$", text, re.M)
    shown = {model: (ours, peer) for model, ours, peer in rows}
    for series in json.loads((root / "bench/results/h200.json").read_text())["series"]:
        if all("peer" in row for row in series["rows"]):
            wanted = tuple("/".join(f"{row[key]:.0f}" for row in series["rows"]) for key in ("tok_s", "peer"))
            assert shown[series["name"]] == wanted, series["name"]


@pytest.mark.parametrize("sections", ["dense,prompt", pytest.param("contexts,tables", marks=pytest.mark.long)])
def test_the_benchmark_of_sparse_attention_runs_dry(sections: str, tmp_path: Path) -> None:
    """It is written for a card, so that nobody else would see that it fails."""
    out = tmp_path / "report.json"
    script = CONFIGURED.parent / "sparse.py"
    ran = subprocess.run([sys.executable, str(script), "--dry-run", "--only", sections, "--out", str(out)],
                         capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    names = [figure["name"] for figure in json.loads(out.read_text())["figures"]]
    wanted = ("dense kernel over a plain read", "over the dense model's", "MTP over plain",
              "step behind the long context", "plain, spread routing, batch 2, share of the floor",
              "MTP, learned routing, batch 1, tokens/s")
    found = [any(name.startswith(one) for name in names) for one in wanted]
    assert found == [sections == "dense,prompt"] * 2 + [sections == "contexts,tables"] * 4
