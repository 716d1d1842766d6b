"""RequestChecks: checks a caller's prompt and parameters and makes a CheckedRequest of them, once, before the engine
gets it.

All errors in a request are found here. The checks only read the engine's limits and settings, so any thread may run
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outrider.core.checked_request import CheckedRequest
from outrider.core.fields import check_value, did_you_mean, shown
from outrider.core.hidden_params import HiddenParams, RequestParams
from outrider.core.params import MAX_LOGPROBS_ALL, Priority, SamplingParams, check_params
from outrider.core.prompts import NEEDED_KEYS, PROMPT_KEYS, Prompt
from outrider.core.token_ids import check_stop_ids, check_token_ids
from outrider.engine.engine_feature import Caller
from outrider.engine.engine_features import EngineFeatures, PartMaker
from outrider.engine.input_reader import InputReader
from outrider.engine.served_model import ServedModel
from outrider.feature_list import input_readers, prompt_keys, whole_prompts

ONLY_TEXT = "only text, token ids and embeddings are served"


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Checks requests. If a request cannot be served, the methods raise a ValueError that tells the caller what to
    change."""

    model: ServedModel
    features: EngineFeatures

    def check(self, prompt: Prompt, params: RequestParams, priority: int = 0) -> CheckedRequest:
        (request,) = self.check_all([prompt], [params], [priority])
        return request

    def check_all(self, prompts: Sequence[Prompt], params: Sequence[RequestParams],
                  priorities: Sequence[int], caller: Caller | None = None) -> list[CheckedRequest]:
        """Make one checked request for each prompt. This may take seconds, if a text is long or a feature prepares
        something. Parameters that several requests share are checked once. `caller`: the tenant on whose behalf the
        requests are checked, for features that give tenants turns."""
        given = {id(own): own for own in params}
        checked = {key: self._check_params(own) for key, own in given.items()}
        makers = {key: self.features.part_makers(own, caller) for key, own in checked.items()}
        return [self._check(prompt, checked[id(own)], priority, makers[id(own)])
                for prompt, own, priority in zip(prompts, params, priorities, strict=True)]

    def join_pairs(self, ones: list[Any], others: list[Any],
                   chat_template: str | None = None) -> list[list[int]]:
        """Make the token ids of one prompt for each pair of texts, for a head that scores pairs. Text i of `others` is
        paired with text i of `ones`, or with the only text of `ones`."""
        classes = self.model.classes
        assert classes is not None
        if classes.num_labels != 1:
            raise ValueError(f"{self.model.name} has {classes.num_labels} classes, and scores of pairs need a model "
                             "with one class: use LLM.classify")
        for text in (*ones, *others):
            check_value("a text of a pair", str, text)
        tokenizer, joined = self.model.need_tokenizer(), []
        for one, other in zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True):
            if chat_template is not None:
                messages = [{"role": "query", "content": one}, {"role": "document", "content": other}]
                joined.append(tokenizer.encode(tokenizer.render_chat(messages, chat_template=chat_template,
                                                                     add_generation_prompt=False)))
            elif classes.separates_pairs:
                joined.append(tokenizer.encoding((one, other)).ids)
            else:
                joined.append(tokenizer.encode(one + other))
        return joined

    def _check(self, prompt: Prompt, params: RequestParams, priority: int,
               makers: Sequence[PartMaker]) -> CheckedRequest:
        given = _as_dict(prompt)
        max_len = self.model.limits.max_len - isinstance(params, SamplingParams)
        if isinstance(given.get("prompt_token_ids"), (list, tuple)):  # before millions of ids are looked at
            self._check_length(len(given["prompt_token_ids"]), max_len)
        of_features = {} if given.keys() <= PROMPT_KEYS.keys() else prompt_keys()
        for key, declared in (PROMPT_KEYS | of_features).items():
            check_value(key, declared, given.get(key))
        check_value("priority", Priority, priority)
        text, _, salt = map(given.get, PROMPT_KEYS)
        found = input_readers(given) if of_features else []
        readers: list[InputReader] = [read(given, params, self.model) for read in found]
        find_ids: Callable[[], Sequence[int]] = partial(self._own_ids, given)
        for reader in readers:
            find_ids = partial(reader.token_ids, find_ids)
        token_ids = tuple(find_ids())
        self._check_tokens(token_ids, max_len)
        inputs = [part for reader in readers for part in reader.make_parts(token_ids)]
        request = CheckedRequest(token_ids, params, text, priority, salt,
                                 has_ids=all(reader.has_ids for reader in readers),
                                 parts=(*inputs, *(make() for make in makers)))
        if request.generates:
            check_stop_ids(request.stop_ids(self.model.eos_ids), self.model.limits)
        return request

    def _own_ids(self, prompt: dict[str, Any]) -> Sequence[int]:
        """Return the token ids that a prompt gives, or tokenize its text."""
        token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if token_ids is None:
            assert isinstance(text, str), "a prompt has a text, token ids or inputs of a feature"
            token_ids = self.model.need_tokenizer().encode(text)
        return token_ids

    def _check_params(self, given: RequestParams) -> RequestParams:
        """Check parameters, and return a copy in which words are token ids. Several requests may share the copy."""
        if isinstance(given, HiddenParams):
            return given.checked(self.model.limits.hidden_size, self.model.classes)
        if self.model.classes is not None:
            raise ValueError(f"{self.model.name} classifies and generates no text: use LLM.classify or LLM.encode")
        limits, params = self.model.limits, check_params(given)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            most = limits.vocab_size if value == MAX_LOGPROBS_ALL else value
            if most is not None and most > limits.max_logprobs:
                raise ValueError(f"{name}={value} exceeds max_logprobs={limits.max_logprobs} of this engine: ask for "
                                 "fewer, or start the engine with a larger max_logprobs")
        if params.stop_strings and self.model.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        params = self._with_bad_word_ids(params)
        check_token_ids(params, limits)
        self.features.check_params(params)
        return params

    def _check_tokens(self, token_ids: tuple[Any, ...], max_len: int) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        self._check_length(len(token_ids), max_len)
        if set(map(type, token_ids)) != {int}:
            token = next(token for token in token_ids if type(token) is not int)
            raise ValueError(f"prompt token ids must be integers, got {shown(token)}")
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self.model.limits.vocab_size:
                raise ValueError(f"prompt token id {shown(token)} is outside the vocabulary of "
                                 f"{self.model.limits.vocab_size} tokens: give ids from 0 to "
                                 f"{self.model.limits.vocab_size - 1}")

    def _check_length(self, num_tokens: int, max_len: int) -> None:
        if num_tokens > max_len:
            raise ValueError(
                f"the prompt has {num_tokens} tokens and max_model_len is {self.model.limits.max_len}, which leaves no "
                "room for an answer: shorten the prompt or raise max_model_len"
            )

    def _with_bad_word_ids(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words or params.bad_words_token_ids:
            return params
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and this engine has none: use logit_bias or "
                             "allowed_token_ids")
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            # At the start of a text and after a space a word has different tokens: forbid both.
            for text in (word.lstrip(), " " + word.lstrip()):
                words[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        return replace(params, bad_words_token_ids=tuple(words))


def _as_dict(prompt: Prompt) -> dict[str, Any]:
    """Convert a prompt of any form into the dict form."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, (list, tuple)):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, dict):
        raise ValueError(f"a prompt is a text, token ids or a dict, got {shown(prompt)}")
    if all(prompt.get(key) is None for key in NEEDED_KEYS) and all(prompt.get(key) is None for key in whole_prompts()):
        *others, last = map(repr, (*NEEDED_KEYS, *whole_prompts()))
        raise ValueError(f"a prompt needs {', '.join(others)} or {last}, got "
                         f"{', '.join(map(str, prompt)) or 'nothing'}")
    for key in prompt:
        if key not in PROMPT_KEYS and prompt[key] is not None and key not in (known := PROMPT_KEYS | prompt_keys()):
            hint = did_you_mean(str(key), known) or ":"
            raise ValueError(f"a prompt with the key {shown(key)} is not supported{hint} {ONLY_TEXT}; supported keys "
                             f"are {', '.join(known)}")
    return prompt
