"""A feature from outside the package whose prompts have pictures among their tokens. It uses all of InputPart: vectors
by positions, tokens that see each other, cuts, and keys of the pages that they touch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, feature_list
from outrider.async_llm import _take_long
from outrider.beam_search import BeamSearchParams
from outrider.core.hidden_params import RequestParams
from outrider.core.input_part import InputPart, InputVectors
from outrider.core.outputs import RequestOutput
from outrider.engine.input_reader import InputReader
from outrider.engine.served_model import ServedModel
from outrider.feature_list import FeatureEntry, register_feature
from tests.engine.harness import Rig, greedy, prompt_of, tiny_model, tokens_of

PLACE = 7  # the token that stands for a picture


@dataclass(frozen=True, slots=True, eq=False)
class Pictures(InputPart):
    starts: tuple[int, ...]
    vectors_of: tuple[np.ndarray, ...]

    def page_content(self, start: int, end: int, token_ids: Sequence[int]) -> list[int]:
        touching = [own for first, own in self._placed() if first < end and start < first + len(own)]
        return [int.from_bytes(hashlib.blake2b(own.data, digest_size=7).digest(), "big") for own in touching]

    def last_cut(self, position: int) -> int:
        return next((first for first, last in self._ranges() if first < position < last), position)

    def next_cut(self, position: int) -> int:
        return next((last for first, last in self._ranges() if first < position < last), position)

    def vectors(self, start: int, end: int) -> InputVectors | None:
        positions = np.concatenate([np.arange(first, last) for first, last in self._ranges()])
        own = (start <= positions) & (positions < end)
        return InputVectors(positions[own], np.concatenate(self.vectors_of)[own]) if own.any() else None

    def two_way_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return ((first, last) for first, last in self._ranges() if start <= first and last <= end)

    def _placed(self) -> Iterator[tuple[int, np.ndarray]]:
        return zip(self.starts, self.vectors_of, strict=True)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        return ((first, first + len(own)) for first, own in self._placed())


class PicturesReader(InputReader):
    def __init__(self, prompt: Mapping[str, Any], params: RequestParams, model: ServedModel) -> None:
        self._pictures = [np.ascontiguousarray(picture) for picture in prompt["pictures"]]
        for own in self._pictures:
            if len(own) > model.longest_range:
                raise ValueError(f"a picture has {len(own)} vectors, and a step takes {model.longest_range}")

    def token_ids(self, own: Callable[[], Sequence[int]]) -> list[int]:
        """The prompt, with as many places for every picture as it has vectors."""
        left = list(self._pictures)
        return [token for given in own() for token in ([PLACE] * len(left.pop(0)) if given == PLACE else [given])]

    def make_parts(self, token_ids: Sequence[int]) -> list[Pictures]:
        starts, at = [], 0
        for picture in self._pictures:
            at = token_ids.index(PLACE, at)
            starts.append(at)
            at += len(picture)
        return [Pictures(tuple(starts), tuple(self._pictures))]


ENTRY = FeatureEntry("pictures", reader=PicturesReader, prompt_keys={"pictures": list | None})
MODEL = tiny_model("llama")
TEXTS = [[token for token in prompt_of(seed, 18) if token != PLACE] for seed in (1, 2, 3)]


@pytest.fixture(autouse=True)
def feature() -> Iterator[None]:
    register_feature(ENTRY)
    yield
    feature_list._registered.pop(ENTRY.name)


def picture(seed: int, size: int) -> np.ndarray:
    found: torch.Tensor = MODEL.embed_tokens.look_up(torch.tensor(prompt_of(seed, size)))  # type: ignore[attr-defined]
    return found.numpy()


def prompt_with(*pictures: np.ndarray) -> dict[str, Any]:
    return {"prompt_token_ids": [*TEXTS[0], PLACE, *TEXTS[1], PLACE, *TEXTS[2]], "pictures": list(pictures)}


def same_by_hand(*pictures: np.ndarray) -> dict[str, Any]:
    """The same prompt by the package's own features."""
    first, second = pictures
    starts = len(TEXTS[0]), len(TEXTS[0]) + len(first) + len(TEXTS[1])
    spans = [[start, start + len(own)] for start, own in zip(starts, pictures, strict=True)]
    return {"prompt_token_ids": [*TEXTS[0], *[0] * len(first), *TEXTS[1], *[0] * len(second), *TEXTS[2]],
            "prompt_embeds": np.concatenate(pictures), "bidirectional_spans": spans,
            "prompt_embeds_positions": [position for start, end in spans for position in range(start, end)]}


def run(rig: Rig, *prompts: Any) -> list[RequestOutput]:
    for index, prompt in enumerate(prompts):
        request = rig.engine.checks.check(prompt, greedy(6))
        rig.engine.add({str(index): request})
        rig.outputs._outputs[str(index)] = RequestOutput.empty(str(index), None, list(request.token_ids), greedy(6))
    done: dict[str, RequestOutput] = {}
    while rig.engine.has_work:
        done |= {output.request_id: output for output in rig.outputs.step() if output.finished}
    rig.assert_clean()
    return [done[str(index)] for index in range(len(prompts))]


def test_pictures_are_the_vectors_and_ranges_that_they_stand_for() -> None:
    """In steps too short for the whole prompt, beside requests without pictures."""
    pictures = picture(5, 11), picture(6, 9)
    with Rig(MODEL, attention_backend="torch") as rig:
        expected = tokens_of(run(rig, same_by_hand(*pictures)))
        assert expected != tokens_of(run(rig, same_by_hand(*pictures) | {"bidirectional_spans": None}))
        assert expected != tokens_of(run(rig, same_by_hand(*pictures[::-1])))
    with Rig(MODEL, attention_backend="torch", max_num_batched_tokens=16, depth=2) as rig:
        own, _, again = run(rig, prompt_with(*pictures), TEXTS[2], prompt_with(*pictures))
        assert tokens_of([own, again]) == expected * 2
        assert not rig.step.state.params.inputs._by_row


def test_pages_before_another_picture_are_shared() -> None:
    first, second, third = picture(5, 11), picture(6, 9), picture(8, 9)
    with Rig(MODEL, attention_backend="torch") as rig:
        run(rig, prompt_with(first, second))
        pairs = (first, second), (first, third), (third, second)
        same, other, none = (run(rig, prompt_with(*pair))[0] for pair in pairs)
        assert same.metrics.num_cached_tokens > other.metrics.num_cached_tokens > none.metrics.num_cached_tokens == 16
        with Rig(MODEL, attention_backend="torch", enable_prefix_caching=False) as fresh:
            assert tokens_of([other]) == tokens_of(run(fresh, prompt_with(first, third)))


def test_a_hit_ends_outside_of_a_picture() -> None:
    """Pages up to position 48 are equal, and it lies in the picture."""
    long, size = picture(9, 34), len(TEXTS[0])
    assert 16 < size < 48 < size + 34
    with Rig(MODEL, attention_backend="torch") as rig:
        for after, cached in ((TEXTS[1], 0), (TEXTS[2], 16)):
            (output,) = run(rig, {"prompt_token_ids": [*TEXTS[0], PLACE, *after], "pictures": [long]})
            assert output.metrics.num_cached_tokens == cached


def test_a_key_may_stand_for_a_prompt_and_take_long_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(PicturesReader):
        def token_ids(self, own: Callable[[], Sequence[int]]) -> list[int]:
            return super().token_ids(lambda: [PLACE] * len(self._pictures))

    alone = FeatureEntry("alone", reader=Alone, prompt_keys={"gallery": list | None, "pictures": list | None},
                         whole_prompts=("pictures",), slow_keys=("pictures",))
    monkeypatch.setitem(feature_list._registered, ENTRY.name, alone)
    prompt = {"pictures": [picture(5, 4), picture(6, 3)]}
    with Rig(MODEL, attention_backend="torch") as rig:
        assert len(rig.engine.checks.check(prompt, greedy(1)).token_ids) == 7
        with pytest.raises(ValueError, match=r"'prompt_token_ids', 'prompt_embeds' or 'pictures', got gallery"):
            rig.engine.checks.check({"gallery": []}, greedy(1))
        with pytest.raises(ValueError, match=r"beam_search: a prompt's 'pictures' is not supported"):
            LLM.around(rig.engine).beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=1))
    assert _take_long([prompt], greedy(1)) and not _take_long([TEXTS[0]], greedy(1))


def test_a_prompt_names_a_key_that_some_feature_reads() -> None:
    with Rig(MODEL, attention_backend="torch") as rig:
        with pytest.raises(ValueError, match="pictures must be a list"):
            run(rig, {"prompt_token_ids": [PLACE], "pictures": 5})
        with pytest.raises(ValueError, match="'picture' is not supported: did you mean pictures"):
            run(rig, {"prompt_token_ids": [PLACE], "picture": []})
        with pytest.raises(ValueError, match="a picture has 65 vectors, and a step takes 60"):
            run(rig, prompt_with(picture(5, 65), picture(6, 2)))
