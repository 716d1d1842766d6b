"""`outrider verify` and the spread routing of benchmarks on the card, by the command line."""

from __future__ import annotations

import json

import pytest

from outrider.cli import main
from tests.gpu.conftest import HAS_CARD
from tests.gpu.test_engines import ASSETS, folder_of

DEVICE = "cuda" if HAS_CARD else "cpu"
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})


@pytest.mark.together("verify")
def test_verify_tries_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quick", "--max-tokens", "10", "--json", "--device", DEVICE, "--dtype", "float32"]
    status = main(["verify", str(folder_of("llama")), *flags, "--speculative-config", NGRAM])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0 and report["passed"], [row["detail"] for row in report["rows"] if row["detail"]]
    untried = [row["way"] for row in report["rows"] if not row["is_met"] and not row["drafts"]]
    assert not untried, "also those with padding"


@pytest.mark.together("verify")
def test_verify_finds_only_near_ties_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    """A trained model and its head: it favours some tokens, so that a fault could not pass for a near-tie."""
    drafts = json.dumps({"method": "eagle3", "model": str(ASSETS / "eagle3"), "num_speculative_tokens": 3})
    flags = ["--quick", "--max-tokens", "24", "--json", "--device", DEVICE, "--dtype", "bfloat16"]
    status = main(["verify", str(ASSETS / "target"), *flags, "--speculative-config", drafts])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0 and report["passed"], [row["detail"] for row in report["rows"] if row["verdict"] == "fault"]
    assert any(row["happened"]["accepted"] for row in report["rows"])


@pytest.mark.together("bench")
def test_bench_counts_experts_in_captured_steps_and_out_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shapes", "6x9x12", "--num-pages", "99", "--rounds", "1", "--device", DEVICE, "--routing", "spread",
             "--max-num-batched-tokens", "64", "--max-model-len", "128"]
    assert main(["bench", "throughput", str(folder_of("qwen3_moe")), *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = report["results"]
    assert 6 < row["distinct_experts"] <= 8 and row["floor_tok_s"] > row["out_tok_s"] > 0
    assert report["bandwidth_gb_s"] > (50 if HAS_CARD else 0), "other processes use the card too"


@pytest.mark.gpu
@pytest.mark.together("bench")
def test_spread_routing_draws_anew_in_every_replay() -> None:
    import torch

    from outrider.kernels.moe import RouteRule
    from outrider.layers.router import Router, SpreadRouting

    device = torch.device("cuda", 0)
    routers = [Router(i, 8, RouteRule(64, 6), dtype=torch.float32, device=device) for i in (2, 5)]
    spread = SpreadRouting(routers, device=device)
    with torch.inference_mode():
        spread(2, 16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            drawn = torch.stack([spread(2, 16), spread(5, 16)])
        seen = []
        for _ in range(5):
            graph.replay()
            seen.append(tuple(drawn.flatten().tolist()))
    assert len(set(seen)) == 5
    assert all(len(set(row)) == 6 for row in torch.tensor(seen).view(-1, 6).tolist())
