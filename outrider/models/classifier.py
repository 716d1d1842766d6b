"""Classifiers of the Llama family: a linear head over the last token's hidden state, `score.weight`, replaces the
output over the vocabulary. Names and defaults are those of transformers' `*ForSequenceClassification`.

A reranker that was published as a language model has no such head. Its config names tokens (`classifier_from_token`, as
vLLM's overrides do): their logits are the scores, or, for two tokens, the difference is the single score.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core.class_head import ClassHead
from outrider.layers import Linear, Module, StepContext
from outrider.models.config import ConfigReader
from outrider.models.llama import Llama, Mistral, Qwen2, Qwen3

ACTIVATION_OF = {"regression": "identity", "single_label_classification": "softmax",
                 "multi_label_classification": "sigmoid"}
METHODS = ("from_2_way_softmax", "no_post_processing")  # of classifier_from_token
# Activations that sentence-transformers names in a config.
ACTIVATION_FUNCTIONS = {"torch.nn.modules.linear.Identity": "identity",
                        "torch.nn.modules.activation.Sigmoid": "sigmoid",
                        "torch.nn.modules.activation.Softmax": "softmax"}


class Classifier(Llama):
    """The base class of the classifiers below. Scores are float32 (float64 in a float64 model)."""

    classes: ClassHead
    score: Linear | None = None

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        self._token_ids = config.get("classifier_from_token", list, [])
        self.has_output = bool(self._token_ids)
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)
        self.classes = read_classes(config)
        if self._token_ids:
            return
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.score = Linear(self.hidden_size, self.classes.num_labels, bias=False, dtype=wide, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), *([] if self.score is None else [("score", self.score)])]

    def class_scores(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        if self.score is not None:
            return self.score(hidden.to(self.score.declared.dtype), context)
        logits = self.logits(hidden, context)[:, self._token_ids]
        return logits if self.classes.num_labels > 1 or logits.shape[1] == 1 else logits[:, 1:] - logits[:, :1]


class LlamaClassifier(Classifier):
    pass


class MistralClassifier(Classifier, Mistral):
    pass


class Qwen2Classifier(Classifier, Qwen2):
    pass


class Qwen3Classifier(Classifier, Qwen3):
    pass


def read_classes(config: ConfigReader) -> ClassHead:
    names = config.get("id2label", dict, {})
    num = len(names) or config.get("num_labels", int, 2, least=1)
    token_ids = config.get("classifier_from_token", list, [])
    if token_ids:
        is_difference = config.get("is_original_qwen3_reranker", bool, False)
        method = config.must_equal("method", *METHODS, default=METHODS[0] if is_difference else METHODS[1])
        if method == METHODS[0] and len(token_ids) != 2:
            raise config.refusal("classifier_from_token", f"the method {method} needs exactly two tokens (yes and no)")
        names, num = {}, 1 if method == METHODS[0] else len(token_ids)
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(num))
    activation = "softmax" if num > 1 else "sigmoid"
    if config.has("problem_type"):
        activation = ACTIVATION_OF[config.must_equal("problem_type", *ACTIVATION_OF)]
        if activation == "softmax" and num == 1:
            activation = "sigmoid"
    elif config.has("sentence_transformers"):
        own = config.section("sentence_transformers")
        own.passes_over("version")
        if own.has("activation_fn"):
            activation = ACTIVATION_FUNCTIONS[own.must_equal("activation_fn", *ACTIVATION_FUNCTIONS)]
    return ClassHead(labels, activation, config.get("use_sep_token", bool, not token_ids))
