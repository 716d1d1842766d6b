"""Logits processors of an operator: they see the tokens before each position, with drafts as without, and an exception
ends one request. In float64, where any difference is a bug."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
    process_dict_updates,
)
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of

MADE: list[Any] = []  # a second instance is made only after an exception


class History(AdapterLogitsProcessor):
    """Favours a token that every token before the position decides, and checks the prompt."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        factor = (params.extra_args or {}).get("factor")
        if factor is None:
            return None

        def process(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            assert len(prompt_ids) > 2
            logits[(factor * sum(output_ids) + 3 * len(output_ids)) % 200 + 4] += 12
            return logits

        return process


class Incremental(LogitsProcessor):
    """Keeps a state of each request that only grows, as code without drafts in mind does: the sum of its outputs."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.model_config.get_vocab_size() == 256 and device.type == "cpu" and not is_pin_memory
        MADE.append(self)
        self._states: dict[int, list[Any]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._states, batch_update, lambda params, prompt, outputs: [outputs, 0, 0])
        for state in self._states.values():
            outputs, seen, _ = state
            assert len(outputs) >= seen
            state[1], state[2] = len(outputs), state[2] + sum(outputs[seen:])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert sorted(self._states) == list(range(len(logits)))
        for index, (_, _, total) in self._states.items():
            logits[index, total % 200 + 4] += 12
        return logits


@pytest.fixture(autouse=True)
def forget_instances() -> None:
    MADE.clear()


class Sharpen(LogitsProcessor):
    """Halves the temperature of every request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * 2 - 1


class Fragile(AdapterLogitsProcessor):
    """Raises where a request says, and otherwise forbids all tokens but one."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("only", 0), int):
            raise ValueError("only must be an integer")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        extra = params.extra_args or {}
        if extra.get("raises") == "at once":
            raise KeyError("at once")

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if extra.get("raises") == len(output_ids):
                logits.fill_(0)
                raise KeyError(len(output_ids))
            return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(extra["only"]), 0.0)

        return process if extra else None


ASKS = [
    Ask(prompt_of(1, 9), greedy(20, extra_args={"factor": 7})),
    Ask(prompt_of(2, 40), SamplingParams(temperature=0.8, seed=5, max_tokens=14, top_p=0.9, min_p=0.01,
                                         extra_args={"factor": 3}, logprobs=2)),
    Ask(prompt_of(3, 5), greedy(8)),
    Ask(prompt_of(4, 11), SamplingParams(temperature=1.2, seed=9, max_tokens=25, repetition_penalty=1.3, top_k=20)),
    Ask(prompt_of(5, 30), greedy(12, extra_args={"factor": 1}, logit_bias={9: 4.0})),
    Ask(prompt_of(6, 7), SamplingParams(temperature=0.7, seed=2, max_tokens=9, n=2, extra_args={"factor": 11})),
]


def run(kinds: list[Any], asks: list[Ask] = ASKS, preempts: bool = False, **settings: Any) -> list[list[list[int]]]:
    with Rig(tiny_model("llama"), logits_processors=kinds, **settings) as rig:
        return tokens_of(rig.run(asks, after_step=rig.preempt if preempts else None))


def test_a_position_is_processed_with_the_tokens_before_it() -> None:
    ask = Ask(prompt_of(1, 9), greedy(12, extra_args={"factor": 7}))
    ((tokens,),) = run([History], [ask])
    ((plain,),) = run([], [Ask(ask.prompt, greedy(12))])
    favoured = [(7 * sum(tokens[:at]) + 3 * at) % 200 + 4 for at in range(len(tokens))]
    assert sum(token == wanted for token, wanted in zip(tokens, favoured, strict=True)) > 8 and tokens != plain


def test_ids_that_stand_beside_embeddings_are_the_prompt_of_a_processor() -> None:
    prompt, params = prompt_of(1, 9), greedy(6, extra_args={"factor": 7})
    embeds = tiny_model("llama").embed_tokens.look_up(torch.tensor(prompt))
    (expected,) = run([History], [Ask(prompt, params)])
    given = [Ask(prompt, params, embeds=embeds), Ask(prompt, params, embeds=embeds[2:5], embeds_at=[2, 3, 4])]
    assert run([History], given) == [expected] * 2
    with Rig(tiny_model("llama"), logits_processors=[History]) as rig:
        (output,) = rig.run([Ask([], params, embeds=embeds)])
        assert "this prompt has only embeddings" in (output.outputs[0].error or "")


@pytest.mark.parametrize("kind", [History, Incremental])
@pytest.mark.parametrize("is_right", [True, False])
def test_drafts_change_no_token(kind: Any, is_right: bool) -> None:
    expected = run([kind, Sharpen], max_num_seqs=3)
    lines = {tuple(ask.prompt): samples for ask, samples in zip(ASKS, expected, strict=True)}

    def line(prompt: tuple[int, ...], sample: int) -> list[int]:
        return [token if is_right or at % 3 else 5 for at, token in enumerate(lines[prompt][sample])]

    drafter = ScriptedDrafter(3, line, lambda position: position % 4)
    with Rig(tiny_model("llama"), logits_processors=[kind, Sharpen], max_num_seqs=3, drafter=drafter) as rig:
        assert tokens_of(rig.run(ASKS)) == expected
        accepted = sum(part.num_accepted for result in rig.results for part in result.requests)
        assert accepted > (30 if is_right else 10) and len(MADE) == (2 if kind is Incremental else 0)


@pytest.mark.parametrize("settings", [{"overlap": False}, {"max_num_seqs": 1}, {"pad_requests": (4,)},
                                      {"max_num_batched_tokens": 16}, {"preempts": True}], ids=str)
def test_batches_and_preemptions_change_no_token(settings: dict[str, Any]) -> None:
    assert run([History, Incremental, Sharpen], **settings) == run([History, Incremental, Sharpen]) and len(MADE) == 2


def test_a_processor_that_does_nothing_changes_no_token() -> None:
    asks = [Ask(ask.prompt, SamplingParams(**{**vars(ask.params), "extra_args": None})) for ask in ASKS]
    assert run([Fragile], asks) == run([], asks)


def test_one_that_leaves_the_likeliest_acts_on_what_is_drawn() -> None:
    hot = Ask(prompt_of(4, 11), SamplingParams(temperature=1.5, seed=9, max_tokens=20))
    cool = Ask(prompt_of(4, 11), SamplingParams(temperature=0.75, seed=9, max_tokens=20))
    assert run([Sharpen], [hot]) == run([], [cool]) != run([], [hot])
    assert run([Sharpen], [Ask(hot.prompt, greedy())]) == run([], [Ask(hot.prompt, greedy())])


@pytest.mark.parametrize("when", ["at once", 0, 2])
def test_an_exception_ends_one_request_and_names_the_processor(when: Any) -> None:
    asks = [Ask(prompt_of(1, 9), greedy(6, extra_args={"only": 42})),
            Ask(prompt_of(2, 9), greedy(6, extra_args={"only": 43, "raises": when}, allowed_token_ids=[43, 44])),
            Ask(prompt_of(3, 9), greedy(6, extra_args={"only": 44}))]
    with Rig(tiny_model("llama"), logits_processors=[Fragile]) as rig:
        good, bad, other = rig.run(asks)
        assert good.outputs[0].token_ids == [42] * 6 and other.outputs[0].token_ids == [44] * 6
        assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].token_ids == [43] * (2 if when == 2 else 0)
        assert bad.error is not None and bad.error.startswith("the logits processor Fragile failed: KeyError")
        assert rig.run(asks[:1])[0].outputs[0].token_ids == [42] * 6


def test_parameters_and_settings_are_refused_by_name() -> None:
    with Rig(tiny_model("llama"), logits_processors=[Fragile]) as rig:
        with pytest.raises(ValueError, match="^extra_args: Fragile refuses them: ValueError: only must be an integer"):
            rig.engine.checks.check([1, 2], greedy(4, extra_args={"only": "x"}))
    with Rig(tiny_model("llama")) as rig, pytest.raises(ValueError, match="this engine has none: leave extra_args out"):
        rig.engine.checks.check([1, 2], greedy(4, extra_args={"only": 1}))
    for given in ("nowhere", int, "nowhere:Kind", "outrider.config:EngineConfig"):
        with pytest.raises(ValueError, match=f"must be a list of subclasses .*'package.module:Class', got .*{given}"):
            EngineConfig("tiny", logits_processors=[given])
    EngineConfig("tiny", logits_processors=[f"{__name__}:Fragile"])
    with pytest.raises(ValueError, match="logits_processors: LogitsProcessor raised in its constructor: TypeError"):
        Rig(tiny_model("llama"), logits_processors=[LogitsProcessor])
