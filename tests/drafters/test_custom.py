"""The drafter of docs/drafters.md, taken from the page itself: it runs, and does not change the text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from outrider.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter
from outrider.engine.assembly import engine_around
from outrider.runner.worker import Worker
from tests.engine.harness import GrowingOutputs, prompt_of, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


def tokens(speculative: dict[str, object] | None) -> tuple[list[list[int]], int]:
    config = EngineConfig("tiny", max_model_len=128, max_num_seqs=4, num_pages=64, speculative_config=speculative)
    engine = engine_around(config, Worker(config, tiny_model("llama")))
    growing = GrowingOutputs(engine)
    for i in range(3):
        params = SamplingParams(temperature=0, max_tokens=24, logit_bias={7: 4.0}, ignore_eos=True)
        growing.add(str(i), prompt_of(i, 9 + i), params)
    done = {}
    while len(done) < 3:
        done.update({output.request_id: output for output in growing.step() if output.finished})
    engine.close()
    outputs = [done[str(i)] for i in range(3)]
    return [o.outputs[0].token_ids for o in outputs], sum(o.metrics.num_draft_tokens for o in outputs)


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 30
    (tmp_path / "mymodule.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mymodule", None)
    plain, _ = tokens(None)
    drafted, num_drafts = tokens({"method": "mymodule:RepeatLast", "num_speculative_tokens": 3, "auto": False})
    assert drafted == plain
    assert num_drafts > 0


MODULE = """
from outrider.drafters.base import Drafter

class Plain(Drafter):
    def __init__(self, num_speculative_tokens, target):
        self.max_drafts = num_speculative_tokens

class FarLayers(Plain):
    aux_layers = (99,)

class FarSlots(Plain):
    lookahead = 50

class Unnamed(Plain):
    name = 3

class NoArguments(Drafter):
    def __init__(self):
        pass

class NoFile(Drafter):
    def __init__(self, num_speculative_tokens, target):
        raise OSError("no file of mine")

class NoDrafter:
    pass

def number(num_speculative_tokens, target):
    return 5

instance = Plain(2, None)
"""
REFUSED = {
    "odd:FarLayers": "odd:FarLayers.aux_layers must be a list, each an integer from 0 to 2, got",
    "odd:FarSlots": "odd:FarSlots.lookahead must be an integer from 0 to 4, got 50",
    "odd:Unnamed": "odd:Unnamed.name must be a text, got 3",
    "odd:number": "odd:number made 5, not an outrider.drafters",
    "odd:NoArguments": "odd:NoArguments(num_speculative_tokens, target) raised TypeError: ",
    "odd:NoFile": "odd:NoFile(num_speculative_tokens, target) raised OSError: no file of mine",
    "odd:NoDrafter": "odd:NoDrafter is not a subclass of", "odd:instance": "odd:instance is not a subclass of",
    "odd:Nothing": "cannot import the drafter 'odd:Nothing': AttributeError: ",
    "broken:Drafter": "cannot import the drafter 'broken:Drafter': ZeroDivisionError: ",
}


def test_attributes_keep_their_old_names_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="Old.taps is called aux_layers now"):
        class Old(Drafter):
            taps = (1, 2)
    assert Old.aux_layers == (1, 2)
    drafter = Drafter()
    with pytest.warns(FutureWarning, match="Drafter.skip_reads_taps is called skip_reads_aux now"):
        drafter.skip_reads_taps = False  # type: ignore[attr-defined]
    assert drafter.skip_reads_aux is False


@pytest.mark.parametrize("path", REFUSED)
def test_a_class_that_no_step_could_run_is_refused_by_name(path: str, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("odd", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ValueError) as refusal:
        tokens({"method": path, "num_speculative_tokens": 3, "auto": False})
    assert str(refusal.value).startswith(f"speculative_config: {REFUSED[path]}")
