"""`outrider bench serve` against a server: counts, percentiles, failures."""

from __future__ import annotations

import json

import pytest

from bench import server_front
from outrider.benchmarks.server_load import Measured, percentile, summary
from outrider.cli import main
from outrider.commands.http_stream import Address
from tests.server.rig import Served, served_fixture

served = served_fixture(api_key=("key",), max_num_queued_reqs=1000)


def bench(served: Served, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, float]:
    main(["bench", "serve", "--base-url", served.url, "--api-key", "key", "--vocab-size", "250", "--input-len", "20",
          "--output-len", "6", "--num-prompts", "6", *flags])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("flags", [["--max-concurrency", "2"], ["--request-rate", "100"], ["--chat"]])
def test_it_counts_what_the_server_did(served: Served, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    result = bench(served, capsys, *flags, "--goodput", "ttft:100000")
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 36)
    assert "--chat" in flags or result["total_input_tokens"] == 120
    assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    assert result["p50_tpot_ms"] > 0 and result["request_goodput"] == result["request_throughput"]
    served.assert_idle()


def test_failures_are_counted_and_said(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "serve", "--base-url", served.url, "--model", "other", "--api-key", "key",
                 "--num-prompts", "2"])
    shown = capsys.readouterr()
    assert code == 1 and json.loads(shown.out.splitlines()[-1])["failed"] == 2
    assert "this server has no model" in shown.err
    assert main(["bench", "serve", "--base-url", served.url]) == 2  # no key: the list of models is refused
    assert "401" in capsys.readouterr().err


def test_times_of_a_request() -> None:
    one = Measured(began=1.0, first=1.5, last=2.5, gaps=[0.25, 0.75], num_tokens=5)
    assert one.times == {"ttft": 500, "e2el": 1500, "tpot": 250}
    result = summary([one, Measured(0.0, error="x")], 2.0, {"tpot": 200})
    assert result["p50_itl_ms"] == 500 and result["request_goodput"] == 0 and result["output_throughput"] == 2.5
    assert percentile([1, 2, 3, 4], 50) == 2.5 and percentile([7], 99) == 7


def test_addresses() -> None:
    assert Address.parse("http://h:81/v1") == Address("h", 81, False, "")
    assert Address.parse("https://h/api/v1/") == Address("h", 443, True, "/api")
    with pytest.raises(ValueError, match="is not the address of a server"):
        Address.parse("ftp://h")


def test_the_front_is_measured_with_an_engine_that_costs_nothing() -> None:
    events = server_front.measure_front(num_streams=2, num_tokens=5)["events"]
    assert 2 <= events <= 10  # tokens that wait for their reader go out in one event
