"""TrainingSettings: every setting of a training run with its default, frozen. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

from outrider.core.fields import Count, OneOf, Range, check_fields
from outrider.core.params import Seed
from outrider.training.methods import METHODS

FILE_FORMS = ("hf", "speculators")
CPU_MICRO_TOKENS, GPU_MICRO_TOKENS = 8192, 32768
DEFAULT_TEXTS = 4096  # of a target that writes its prompts itself
# Settings that a resumed run may change: they do not change what a step computes.
MAY_CHANGE = ("file_form", "patience", "save_seconds")
# Settings that a method does not read, so that giving them is a mistake.
NOT_READ = {
    "eagle3": ("layers", "markov_rank"),
    "block": ("classic",),
    "mtp": ("taps", "layers", "markov_rank", "intermediate_size", "classic", "freeze_output", "file_form"),
}


@dataclass(frozen=True)
class TrainingSettings:
    method: Annotated[str, OneOf(METHODS)] = "eagle3"
    num_texts: Count | None = None  # answers that are generated; None: one for each prompt, or DEFAULT_TEXTS
    shard_texts: Count = 512  # texts that are generated and stored together
    max_prompt_tokens: Count = 512  # longer prompts are left out
    max_answer_tokens: Count = 512
    temperature: Annotated[float, Range(0.01, 2)] = 0.8  # of every other answer; the rest are greedy
    draft_vocab_size: Count = 8192  # tokens that the head knows: the most frequent ones of the answers
    taps: tuple[Annotated[int, Range(0, 4096)], ...] = ()  # residual streams that it reads; (): the method's usual ones
    passes: Annotated[int, Range(1, 16)] = 4  # drafts that are unrolled in training, or those of a block
    pass_decay: Annotated[float, Range(0.01, 1)] = 0.8  # weight of a pass relative to the one before it
    epochs: Annotated[int, Range(1, 1000)] = 3
    batch_tokens: Count = 16384  # tokens of one step
    micro_tokens: Count | None = None  # tokens that are computed at once; None: see `micro_tokens_on`
    learning_rate: Annotated[float, Range(1e-7, 1)] | None = None  # None: chosen by the hidden size
    warm_up: Annotated[float, Range(0, 0.5)] = 0.04  # share of the steps in which the rate rises
    clip: Annotated[float, Range(1e-3, 1e3)] = 1.0  # largest norm of the gradient
    held_out: Annotated[float, Range(0.001, 0.5)] = 0.05  # share of the texts that acceptance is measured on
    evaluations: Annotated[int, Range(1, 1000)] = 10  # measurements of acceptance over the whole run
    patience: Annotated[int, Range(1, 1000)] = 4  # measurements without a better one that end the run
    save_seconds: Annotated[float, Range(0, 86400)] = 60.0  # between two checkpoints
    layers: Annotated[int, Range(1, 16)] = 3  # of a block drafter
    intermediate_size: Annotated[int, Range(1, 262144)] | None = None  # of MLPs; None: the target's, if it is ordinary
    markov_rank: Annotated[int, Range(0, 4096)] = 0  # of a block drafter's Markov head, which makes it a DSpark one
    classic: bool = False  # the original EAGLE-3; by default taps and fed-back states are normed, as in EAGLE 3.1
    freeze_output: bool = False  # keep the target's rows as the head's output, and train the rest alone
    file_form: Annotated[str, OneOf(FILE_FORMS)] = "hf"
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields("", self)
        self._check_method()
        if self.passes > self.max_answer_tokens:
            raise ValueError(f"answers of {self.max_answer_tokens} tokens are too short for {self.passes} drafts: "
                             "lower passes, or raise max_answer_tokens")
        if self.micro_tokens is not None and self.max_text_tokens > self.micro_tokens:
            raise ValueError(f"a text may have {self.max_text_tokens} tokens (max_prompt_tokens + max_answer_tokens), "
                             f"and only {self.micro_tokens} are computed at once: raise micro_tokens, or lower those")

    def _check_method(self) -> None:
        """Refuse settings that the chosen method does not use."""
        given = [field.name for field in fields(self) if field.name in NOT_READ.get(self.method, ())
                 and getattr(self, field.name) != field.default]
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"method {self.method!r} does not read {flags}: leave it out, or choose "
                             "another method")

    @property
    def max_text_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_answer_tokens

    def with_num_texts(self, num_prompts: int) -> TrainingSettings:
        """Copy the settings with a number of texts. num_prompts: the number of prompts in the file; 0 if the target
        writes them."""
        return replace(self, num_texts=self.num_texts or num_prompts or DEFAULT_TEXTS)

    def micro_tokens_on(self, device_type: str) -> int:
        """The tokens of a micro-batch: as given, or else more on a GPU than on a CPU. On a GPU a small step takes as
        long as the host needs to launch it, so few large micro-batches are faster."""
        usual = GPU_MICRO_TOKENS if device_type == "cuda" else CPU_MICRO_TOKENS
        return self.micro_tokens or max(usual, self.max_text_tokens)

    def rate_for(self, hidden_size: int) -> float:
        """The peak learning rate: as given, or else one that is proportional to 1 / hidden size above a size of 512."""
        return self.learning_rate or 1e-3 * min(1.0, 512 / hidden_size)

    def as_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of the settings whose values differ although a resumed run must not change them."""
    names = sorted(before.keys() | now.keys())
    return [name for name in names if name not in MAY_CHANGE and before.get(name) != now.get(name)]
