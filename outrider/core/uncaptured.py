"""Uncaptured: the reasons why a step does not run as a captured CUDA graph. No torch."""

from __future__ import annotations

import enum


class Uncaptured(enum.Enum):
    """The reason why a step ran without replaying a captured CUDA graph."""

    NO_GRAPHS = "no graphs on this device, or eager by setting"
    NO_CAPTURED_KERNELS = "layers whose kernels have no captured form"
    MODEL_READS = "a model of transformers whose own code waits for values on the device"
    NO_REQUESTS = "no requests, only pages that move"
    FOLDS = "folds rows that ended"
    SEVERAL_CHECKPOINTS = "several checkpoints of one request"
    SAMPLING_PARAMETERS = "sampling parameters that need kernels, which this model or device has none of"
    MANY_LOGPROBS = "more log-probabilities than a captured step reports"
    PROMPT_LOGPROBS = "log-probabilities of a prompt"
    HIDDEN_STATES = "hidden states of a prompt"
    UNPLACED_LISTS = "a logit_bias or bad_words that found no place on the device"
    EDITED_LOGITS = "logits that code of the operator edits"
    PROMPTS = "prompts whose lengths the host must know"
    PROMPT_EMBEDS = "embeddings in place of token ids"
    DELTAS = "rows with deltas of their own"
    SPANS = "spans of a prompt whose tokens see each other in both directions"
    TOO_MANY_REQUESTS = "more requests than any graph"
    TOO_MANY_TOKENS = "more tokens than any graph"
    OWN_SIZE = "large steps with prompts that padding to a graph's size would lengthen"
    NEW_SIZE = "steps with prompts of a new size, or of one that a graph would not shorten"
    NO_MEMORY = "no memory for a capture"
    TOO_MANY_CAPTURES = "too many sizes captured already"
