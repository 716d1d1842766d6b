"""generate_texts: lets the engine answer prompts, and stores the prompts with their answers in files (shards)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.core import RequestOutput, SamplingParams
from outrider.llm import LLM
from outrider.training.prompts import SelfPrompts
from outrider.training.settings import TrainingSettings
from outrider.training.texts import TextStore, TrainingText

SELF_PROMPT_TOKENS = 128  # longest prompt that the target writes
PASSAGE_TOKENS = 448  # and if it has a passage
LOOP_TOKENS = 8  # see `until_repeated`
MAX_SEED = 1 << 62


@dataclass(frozen=True)
class AnswerPlan:
    """The plan of a run's texts: which prompt each has, and whether its answer is greedy or sampled."""

    settings: TrainingSettings
    num_texts: int
    prompts: list[list[int]]  # of a file; the target writes those that are missing

    def indexes_of(self, shard: int) -> range:
        size = self.settings.shard_texts
        return range(shard * size, min(self.num_texts, (shard + 1) * size))

    def missing_shards(self, store: TextStore) -> list[int]:
        return [shard for shard in range(-(-self.num_texts // self.settings.shard_texts)) if not store.has_shard(shard)]

    def prompt_of(self, index: int) -> list[int] | None:
        """The prompt of a text, from the file; a prompt is answered at most twice. None if the target writes the prompt
        itself."""
        return self.prompts[index % len(self.prompts)] if index < 2 * len(self.prompts) else None

    def is_greedy(self, index: int) -> bool:
        """Whether a text's answer is greedy instead of sampled. The two alternate from text to text; a prompt that is
        answered twice gets one of each."""
        is_second = len(self.prompts) <= index < 2 * len(self.prompts)
        return (index - len(self.prompts) + 1 if is_second else index) % 2 == 0

    def seed_of(self, index: int, is_prompt: bool = False) -> int:
        return (self.settings.seed * 2_000_003 + 2 * index + is_prompt) % MAX_SEED

    def params(self, index: int) -> SamplingParams:
        temperature = 0.0 if self.is_greedy(index) else self.settings.temperature
        return SamplingParams(temperature=temperature, seed=self.seed_of(index), detokenize=False,
                              max_tokens=self.settings.max_answer_tokens)

    def prompt_params(self, index: int, own: SelfPrompts) -> SamplingParams:
        """Sampling parameters of a request in which the target writes a prompt: it ends at the longest length that a
        prompt may have."""
        room = self.settings.max_prompt_tokens - own.num_given_tokens(index)
        if room < 1:
            raise ValueError("the model writes its own prompts, and with --max-prompt-tokens "
                             f"{self.settings.max_prompt_tokens} there is no room for one: raise --max-prompt-tokens, "
                             "or give prompts (--prompts FILE)")
        most = min(PASSAGE_TOKENS if "\n" in own.opener(index) else SELF_PROMPT_TOKENS, room)
        return SamplingParams(temperature=1.0, seed=self.seed_of(index, is_prompt=True), max_tokens=most,
                              detokenize=False)


def generate_texts(llm: LLM, plan: AnswerPlan, store: TextStore, own: SelfPrompts, *,
                   report: Callable[[str], None]) -> None:
    """Generate all shards that the store does not have yet."""
    known, missing = {text.prompt for text in store.read_all()}, plan.missing_shards(store)
    if missing:
        count, settings = sum(len(plan.indexes_of(shard)) for shard in missing), plan.settings
        report(f"generating {count} of {plan.num_texts} texts with answers of up to {settings.max_answer_tokens} "
               f"tokens; a line follows after every {settings.shard_texts}")
    for shard in missing:
        began, indexes = time.perf_counter(), plan.indexes_of(shard)
        given = {index: prompt for index in indexes if (prompt := plan.prompt_of(index)) is not None}
        prompts = given | _written(llm, plan, own, [index for index in indexes if index not in given], known)
        asked = list(prompts)
        outputs = _finished(llm, [prompts[index] for index in asked], [plan.params(index) for index in asked])
        texts = [
            TrainingText((*prompts[index], *answer), len(prompts[index]), plan.is_greedy(index))
            for index, output in zip(asked, outputs, strict=True)
            if (answer := until_repeated(output.outputs[0].token_ids))
        ]
        store.write(shard, texts)
        tokens, seconds = sum(len(text.answer) for text in texts), time.perf_counter() - began
        report(f"texts {indexes[-1] + 1} of {plan.num_texts}: {len(texts)} answers of {tokens} tokens in "
               f"{seconds:.1f} s ({tokens / seconds:.0f} tokens/s)")


def until_repeated(answer: Sequence[int]) -> Sequence[int]:
    """Cut the answer where LOOP_TOKENS tokens occur for the third time. Small targets often repeat themselves without
    end, and a drafter learns nothing from that."""
    places: dict[tuple[int, ...], int] = {}
    for end in range(LOOP_TOKENS, len(answer) + 1):
        stretch = tuple(answer[end - LOOP_TOKENS : end])
        places[stretch] = places.get(stretch, 0) + 1
        if places[stretch] == 3:
            return answer[:end]
    return answer


def _written(llm: LLM, plan: AnswerPlan, own: SelfPrompts, indexes: Sequence[int],
             known: set[tuple[int, ...]]) -> dict[int, list[int]]:
    """Let the target write prompts. A prompt that is in `known` already is left out, and new ones are added to
    `known`."""
    seeds = [own.seed_prompt(index) for index in indexes]
    params = [plan.prompt_params(index, own) for index in indexes]
    outputs = _finished(llm, seeds, params)
    prompts: dict[int, list[int]] = {}
    for index, output in zip(indexes, outputs, strict=True):
        prompt = own.prompt_from(index, list(output.outputs[0].token_ids), llm.engine.model.eos_ids)
        if prompt and tuple(prompt) not in known and len(prompt) <= plan.settings.max_prompt_tokens:
            known.add(tuple(prompt))
            prompts[index] = prompt
    return prompts


def _finished(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False) if prompts else []
    errors = [output.outputs[0].error for output in outputs if output.outputs[0].finish_reason == "error"]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(outputs)} requests failed: {errors[0]}")
    return outputs
