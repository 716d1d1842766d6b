"""Commands on several ranks: `outrider verify` and `outrider bench`."""

from __future__ import annotations

import json

import pytest

from outrider import cli
from outrider.commands import verify
from outrider.runner.interface import NoDeviceMemory
from tests.engine.harness import CONFIGS, save_folder

SETTINGS = ["--device", "cpu", "--dtype", "float64", "-tp", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder without a tokenizer, so that prompts are random and short."""
    config = CONFIGS["llama"] | {"head_dim": 16}  # exact mode has no kernels for heads of 8
    return str(save_folder(tmp_path_factory.mktemp("commands") / "tiny", config, seed=5))


@pytest.mark.long
@pytest.mark.parametrize("exact", [False, True])
def test_verify_compares_ranks_with_themselves_and_with_one(model: str, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str], exact: bool) -> None:
    """Bits are those of a number of ranks; tokens those of one rank but for near-ties, of which float64 has none. Of
    the other variants the last one, which has everything: ranks start anew for each."""
    variants = verify.all_variants
    monkeypatch.setattr(verify, "all_variants", lambda speculative: variants(speculative)[-1:])
    options = ["--exact", "--dtype", "float32"] if exact else ["--speculative-config", json.dumps(
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})]
    assert cli.main(["verify", model, *SETTINGS, "--quick", "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["verdict"] for row in rows] == ["equal"] * len(rows) and all(row["is_met"] for row in rows)
    assert [row["way"] for row in rows] == [*([] if exact else ["one rank"]), "all of these"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_bench_measures_ranks(model: str, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    found = {}
    for num_ranks in (1, 2):
        assert cli.main(["bench", kind, model, "--device", "cpu", "--shapes", "2x8x6", "-tp", str(num_ranks)]) == 0
        found[num_ranks] = json.loads(capsys.readouterr().out.splitlines()[-1])
    one, two = found[1], found[2]
    assert (one["ranks"], two["ranks"]) == (1, 2) and one["dtype"] == two["dtype"] and one["model"] == two["model"]
    (whole,), (parts,) = one["results"], two["results"]
    assert whole.keys() == parts.keys()
    if kind == "throughput":  # on a CPU both parts lie in one memory; norms and the like are there twice
        assert whole["step_mb"] <= parts["step_mb"] < 1.2 * whole["step_mb"] + 0.1 and parts["out_tok_s"] > 0


def test_experts_cannot_be_spread_over_ranks(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "throughput", model, "--device", "cpu", "-tp", "2", "--routing", "spread"]) == 2
    assert "--routing spread changes a model in this process" in capsys.readouterr().err


def test_one_rank_that_lacks_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    def lacks(*_: object) -> None:
        raise NoDeviceMemory("the device has no memory for the weights: choose a smaller model")

    check = verify.Check.__new__(verify.Check)
    check._asks = []
    monkeypatch.setattr(check, "run", lacks)
    row = check.run_one_rank()
    verify._print_row(row)
    verify._print_summary([row], [], False)
    shown = capsys.readouterr().out
    assert "NOT TRIED: its device has too little memory" in shown and "0 of 1 runs give the reference's tokens" in shown
