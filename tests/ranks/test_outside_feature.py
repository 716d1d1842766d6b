"""A feature from outside the package over two ranks: the text is that of one rank."""

from __future__ import annotations

from outrider import feature_list
from outrider.feature_list import register_feature
from outrider.formats import RankGroup
from tests.engine.harness import Rig
from tests.ranks.pool import RankPool
from tests.unit.scaled_feature import ENTRY
from tests.unit.test_extending_feature import FACTORS, PROMPTS, generate, model_of, settings_of


def texts_of(group: RankGroup | None) -> list[list[int]]:
    register_feature(ENTRY)
    try:
        with Rig(model_of("llama", group), **settings_of(drafts=True)) as rig:
            return generate(rig, PROMPTS, FACTORS)
    finally:
        feature_list._registered.pop(ENTRY.name)


def test_two_ranks_have_the_text_of_one(ranks: RankPool) -> None:
    assert ranks.run(2, texts_of) == [texts_of(None)] * 2
