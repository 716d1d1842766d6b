"""The search for wrong tokens in random engines finds wrong tokens, and goes on after a crash."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench import random_cases, random_engines
from bench.random_cases import Wrong, draw_case, judge_greedy, run_case, run_engines
from bench.random_targets import PAIRS, VARIANTS
from outrider.models import conditional
from outrider.models.catalog import FAMILIES
from outrider.models.registry import architectures

PAIR = "Qwen2", "ngram"


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The first seed of the pair whose case runs on one rank and can be judged by transformers."""
    for seed in range(PAIRS.index(PAIR), 100 * len(PAIRS), len(PAIRS)):
        case = draw_case(seed, *PAIR, Random(seed), tmp_path_factory.mktemp("drawn"))
        if case.target.has_oracle and case.target.form is None and case.ranks == 1 and not case.settings["exact"]:
            return seed
    raise AssertionError(f"no seed draws such a case of {PAIR}")


def test_every_family_of_the_catalog_is_drawn() -> None:
    """Classes that serve only the text part of a larger model have the layers of a family that is drawn."""
    ends = ("ForCausalLM", "ForConditionalGeneration")
    served = architectures()
    classes = {name.removesuffix(end) for family in FAMILIES for name in family.architectures for end in ends
               if name.endswith(end) and served[name].__module__ != conditional.__name__}
    same = {"Mistral3": "Mistral", "Gemma4Unified": "Gemma4"}
    assert {same.get(name, name) for name in classes} <= set(VARIANTS)


def test_an_engine_has_the_tokens_of_transformers(seed: int, tmp_path: Path) -> None:
    line = run_case(seed, tmp_path)
    assert "failure" not in line and "refused" not in line
    assert line["tokens"] > line["against_transformers"] > 0 and line["drafts"] > 0


def test_a_token_that_the_plain_engine_has_not_is_found(seed: int, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    serve = random_cases.serve

    def one_wrong(*args: Any) -> Any:
        outputs, aborted = serve(*args)
        tokens = next(output for index, output in outputs.items() if index not in aborted).outputs[0].token_ids
        tokens[-1] = (tokens[-1] + 1) % 16
        return outputs, aborted

    monkeypatch.setattr(random_cases, "serve", one_wrong)
    assert "where the plain engine has" in run_case(seed, tmp_path)["failure"]


def test_a_token_that_transformers_does_not_favour_is_found(seed: int, tmp_path: Path) -> None:
    case = draw_case(seed, *PAIR, Random(seed), tmp_path)
    texts = run_engines(None, case).texts
    assert judge_greedy(case, texts) > 0
    ask, tokens = max(texts, key=lambda text: len(text[1]))
    for place in (0, len(tokens) - 1):
        wrong = list(tokens)
        wrong[place] = (wrong[place] + 1) % 16
        with pytest.raises(Wrong, match=f"output token {place} is {wrong[place]}, and transformers favours"):
            judge_greedy(case, [(ask, wrong)])


def test_a_crash_ends_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "crashes.py"
    script.write_text("import json, sys\n"
                      "for seed in map(int, sys.argv[sys.argv.index('--seeds') + 1 :]):\n"
                      "    print(json.dumps({'begins': seed}), flush=True)\n"
                      "    if seed == 1:\n"
                      "        sys.exit('out of luck')\n"
                      "    print(json.dumps({'seed': seed, 'tokens': 5}), flush=True)\n")
    monkeypatch.setattr(random_engines, "__file__", str(script))
    campaign = random_engines.Campaign(0, 4, 60.0, 30.0, io.StringIO())
    campaign.run(1)
    assert [(line["seed"], line.get("tokens")) for line in campaign.lines] == [(0, 5), (1, None), (2, 5), (3, 5)]
    assert "status 1: out of luck" in campaign.lines[1]["failure"]
    assert "failures                                              1" in random_engines.table(campaign.lines)
