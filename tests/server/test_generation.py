"""Changes that a stream is told of, made of increments that come one by one or many at once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleEnd, SampleKey
from outrider.core.step_messages import TokenLogprobs
from outrider.server.generation import ChangeReader, Usage
from tests.unit.made_requests import made_request

METRICS = RequestMetrics(num_cached_tokens=3)


def increment(sample: int, text: str, token: int, is_last: bool) -> OutputIncrement:
    logprobs = [TokenLogprobs((token,), (-1.0,), 1)] if sample == 0 else None
    return OutputIncrement(SampleKey("r", sample, 0, METRICS), [token], text, logprobs,
                           SampleEnd("length") if is_last else None)


RUNS = st.lists(st.lists(st.sampled_from(["a", "", "bc"]), min_size=1, max_size=6), min_size=1, max_size=3)


@given(texts=RUNS, data=st.data())
def test_any_grouping_of_increments_tells_the_same(texts: list[list[str]], data: st.DataObject) -> None:
    """Nothing is told twice or left out; tokens without a text go with the text that follows them, or with the end."""
    events = [increment(sample, text, i, i == len(own) - 1) for sample, own in enumerate(texts)
              for i, text in enumerate(own)]
    order = data.draw(st.permutations([sample for sample, own in enumerate(texts) for _ in own]))
    waiting = {s: [e for e in events if e.sample.sample_index == s] for s in set(order)}
    events = [waiting[sample].pop(0) for sample in order]
    reader, usage, told = ChangeReader(first_index=10, keeps_runs=True), Usage([made_request([1, 2])]), []
    while events:
        count = data.draw(st.integers(1, len(events)))
        usage.update(0, events[:count])
        told += reader.read(events[:count])
        events = events[count:]
    for sample, own in enumerate(texts):
        mine: Any = [change for change in told if change.choice == 10 + sample]
        assert "".join(change.text for change in mine) == "".join(own)
        assert [token for change in mine for token in change.token_ids] == list(range(len(own)))
        assert [change.finish_reason for change in mine] == [None] * (len(mine) - 1) + ["length"]
        assert all(change.text for change in mine[:-1])
        assert [length for change in mine for length in change.run_lengths] == [1] * len(own)
        if sample == 0:
            assert [entry.token_ids[0] for change in mine for entry in change.logprobs] == list(range(len(own)))
    counted = usage.to_json()
    assert counted["completion_tokens"] == sum(map(len, texts)) and counted["prompt_tokens"] == 2
    assert counted["prompt_tokens_details"] == {"cached_tokens": 3}


def test_without_a_tokenizer_tokens_go_out_as_they_come() -> None:
    reader = ChangeReader(has_text=False)
    assert [change.token_ids for change in reader.read([increment(0, "", 5, False)])] == [[5]]
    assert ChangeReader().read([increment(0, "", 5, False)]) == []
