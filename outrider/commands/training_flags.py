"""The flags of `outrider train-drafter`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from outrider.commands.flag_values import count_flag, number_flag, number_list, whole_flag
from outrider.commands.parser import add_engine_flags, add_model
from outrider.training.methods import METHODS
from outrider.training.settings import FILE_FORMS, TrainingSettings

TRAIN_EXAMPLES = """examples:
  outrider train-drafter smollm2 --out drafter
  outrider train-drafter path/to/folder --prompts questions.jsonl --num-texts 20000 --epochs 3 --out drafter
  outrider train-drafter path/to/folder --out drafter --resume
  outrider generate smollm2 --prompt "The sea is" --speculative-config \\
      '{"method": "eagle3", "model": "drafter", "num_speculative_tokens": 4}'

The model writes the texts itself: answers to the prompts of a file, or to questions that it makes up. The folder is in
the form that vLLM and SGLang load too. The last line of the output is JSON. See docs/training.md.
"""
PLAIN = TrainingSettings()
# (flag, what its text is read by, its place holder, its help)
FLAGS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("num-texts", count_flag, "N", "answers to train on (default: one for each prompt of --prompts, else 4096)"),
    ("shard-texts", count_flag, "N", "answers that are generated together, and lost if the run is killed meanwhile"),
    ("max-prompt-tokens", count_flag, "N", "longer prompts are left out"),
    ("max-answer-tokens", count_flag, "N", "longest answer"),
    ("temperature", number_flag(0.01, 2), "T", "of every other answer; the rest are greedy"),
    ("draft-vocab-size", count_flag, "N", "tokens that the head can draft, the most frequent ones"),
    ("taps", number_list, "N,N",
     "residual streams to read, each after so many layers (default: 2, half, all but 3; five for a block drafter)"),
    ("passes", count_flag, "N", "drafts that are unrolled in training, or those of a block"),
    ("layers", count_flag, "N", "layers of a block drafter"),
    ("intermediate-size", whole_flag(1, 262144), "N", "width of the drafter's MLPs (default: like the target's)"),
    ("markov-rank", whole_flag(0, 4096), "N", "rank of a block drafter's Markov head: DSpark with one, DFlash without"),
    ("pass-decay", number_flag(0.01, 1), "X", "weight of each draft in the loss, relative to the one before it"),
    ("epochs", count_flag, "N", "how often each text is seen"),
    ("batch-tokens", count_flag, "N", "tokens of a step"),
    ("micro-tokens", count_flag, "N",
     "tokens that are computed at once: lower it where memory is short (default: 8192, on a GPU 32768)"),
    ("learning-rate", number_flag(1e-7, 1), "X", "the highest (default: 0.001 up to hidden size 512, then falling)"),
    ("warm-up", number_flag(0, 0.5), "X", "share of the steps in which the rate rises"),
    ("clip", number_flag(1e-3, 1e3), "X", "largest norm of a gradient"),
    ("held-out", number_flag(0.001, 0.5), "X", "share of the prompts that acceptance is measured on"),
    ("evaluations", count_flag, "N", "how often acceptance is measured"),
    ("patience", count_flag, "N", "measurements without more tokens a step that end the training"),
    ("save-seconds", number_flag(0, 86400), "X", "between two checkpoints"),
)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder of the drafter: a new or an empty one")
    parser.add_argument("--resume", action="store_true", help="go on with the run that the folder holds, if it does")
    parser.add_argument("--method", choices=tuple(METHODS), default=PLAIN.method,
                        help="the kind of drafter (default: %(default)s)")
    parser.add_argument("--prompts", metavar="FILE",
                        help="one prompt a line, or .json (a list), or .jsonl (objects with a prompt, question, turns, "
                             "messages or prompt_token_ids)")
    group = parser.add_argument_group("training")
    for name, convert, metavar, text in FLAGS:
        default = getattr(PLAIN, name.replace("-", "_"))
        shown = "" if default is None or default == () else f" (default: {default})"
        group.add_argument(f"--{name}", type=convert, default=argparse.SUPPRESS, metavar=metavar, help=text + shown)
    group.add_argument("--classic", action="store_true",
                       help="the original EAGLE-3, for engines that do not know the norms of EAGLE 3.1")
    group.add_argument("--freeze-output", action="store_true", help="keep the target's own rows as the output layer")
    group.add_argument("--file-form", choices=FILE_FORMS, default=PLAIN.file_form,
                       help="of the original checkpoints, or of the speculators library (default: %(default)s)")
    add_engine_flags(parser, skip=("speculative_config", "enable_prefix_caching", "max_model_len",
                                   "tensor_parallel_size", "kv_events_config", "logits_processors"))
