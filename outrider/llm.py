"""LLM: generates the outputs of a list of prompts. Names follow vLLM's, so that an import can be swapped."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Never, TypeVar, cast

from outrider import compat
from outrider.core import Output, RequestOutput, RequestParams
from outrider.core.checked_request import CheckedRequest
from outrider.core.fields import OneOf, check_value, shown
from outrider.core.lazy_exports import LateModule
from outrider.core.output_reader import OutputReader
from outrider.core.params import RequestOutputKind, SamplingParams
from outrider.core.prompts import Prompt
from outrider.engine.engine import Engine
from outrider.engine.progress import RequestBar
from outrider.engine.request_loop import Caller, RequestLoop
from outrider.front import Front
from outrider.runner.commands import SleepReport, UpdateReport, WakeReport

if TYPE_CHECKING:
    from outrider import adapter_loading, llm_engine, token_scores
    from outrider import beam_search as beams
    from outrider import pooling_outputs as pooled
    from outrider import pooling_params as pooling
    from outrider.beam_search import BeamRound, BeamSearchOutput, BeamSearchParams
    from outrider.compat import Metric
    from outrider.engine import named_weights
    from outrider.engine.named_weights import Weights
    from outrider.llm_engine import LLMEngine
    from outrider.lora_request import AdapterChoice, LoRARequest
    from outrider.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from outrider.pooling_params import PoolingParams
    from outrider.runner.commands import WeightsChecksum
    from outrider.token_scores import TokenScores
else:
    adapter_loading = LateModule("outrider.adapter_loading")
    beams = LateModule("outrider.beam_search")
    llm_engine = LateModule("outrider.llm_engine")
    named_weights = LateModule("outrider.engine.named_weights")
    pooled = LateModule("outrider.pooling_outputs")
    pooling = LateModule("outrider.pooling_params")
    token_scores = LateModule("outrider.token_scores")

T = TypeVar("T")


class LLM(Front):
    """Generates text for prompts: `LLM("smollm2")`, `LLM("path/to/folder")` or `LLM("model.gguf")`; further settings as
    in EngineArgs. Several threads may use one LLM: they take turns making its steps."""

    def _start(self, engine: Engine) -> None:
        super()._start(engine)
        self._loop = RequestLoop(engine)
        self._queue = Caller()  # of `enqueue`
        self._queued: list[str] = []  # ids of its requests, in their order

    def generate(self, prompts: Prompt | Sequence[Prompt] | None = None,
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 prompt_token_ids: list[int] | list[list[int]] | None = None,
                 use_tqdm: bool | Callable[..., Any] = True, lora_request: AdapterChoice = None,
                 priority: int | Sequence[int] | None = None, **misplaced: Never) -> list[RequestOutput]:
        """Return the outputs in the order of the prompts. If one cannot be served, raises ValueError before any is
        started. `priority`: one number for all prompts or one for each; lower numbers are served first.
        `lora_request`: the adapter of all prompts, or a list with one or None for each. `use_tqdm`: show a progress bar
        on a terminal."""
        if misplaced:
            compat.refuse_misplaced(self.generate, misplaced)
        if prompts is not None and prompt_token_ids is not None:
            raise ValueError("give prompts or prompt_token_ids, not both")
        given = cast("Prompt | Sequence[Prompt]", prompt_token_ids if prompts is None else prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        return cast(list[RequestOutput], self._run(given, params, 0 if priority is None else priority, use_tqdm,
                                                   lora_request))

    def encode(self, prompts: Prompt | Sequence[Prompt],
               pooling_params: PoolingParams | Sequence[PoolingParams] | None = None, *,
               use_tqdm: bool | Callable[..., Any] = True, lora_request: AdapterChoice = None,
               pooling_task: str = "embed") -> list[PoolingRequestOutput]:
        """Return the hidden states of the prompts, as tensors in `output.outputs.data`. `pooling_params` say how the
        states of all tokens are combined. `pooling_task` is used without parameters: "embed" gives one vector for each
        prompt, "token_embed" one for each token; "classify" and "token_classify" need a model with a classification
        head."""
        check_value("pooling_task", Annotated[str, OneOf(pooling.TASKS)], pooling_task)
        params = pooling.PoolingParams(task=pooling_task) if pooling_params is None else pooling_params
        outputs = self._pool(prompts, params, use_tqdm, lora_request)
        pooled.as_tensors(outputs)
        return outputs

    def _pool(self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams],
              use_tqdm: bool | Callable[..., Any], lora_request: AdapterChoice) -> list[PoolingRequestOutput]:
        outputs = cast("list[PoolingRequestOutput]", self._run(prompts, params, 0, use_tqdm, lora_request))
        pooled.raise_failed(outputs)
        return outputs

    def embed(self, prompts: Prompt | Sequence[Prompt],
              pooling_params: PoolingParams | Sequence[PoolingParams] | None = None, *,
              use_tqdm: bool | Callable[..., Any] = True,
              lora_request: AdapterChoice = None) -> list[EmbeddingRequestOutput]:
        """Return one vector for each prompt, in `output.outputs.embedding`."""
        given = pooling_params if isinstance(pooling_params, (list, tuple)) else [pooling_params]
        if any(isinstance(params, pooling.PoolingParams) and params.pooling == "all" for params in given):
            raise ValueError("LLM.embed gives one vector for each prompt: use LLM.encode for pooling='all'")
        params = pooling.PoolingParams() if pooling_params is None else pooling_params
        outputs = self._pool(prompts, params, use_tqdm, lora_request)
        return [pooled.EmbeddingRequestOutput.from_pooled(output) for output in outputs]

    def classify(self, prompts: Prompt | Sequence[Prompt], *, pooling_params: PoolingParams | None = None,
                 use_tqdm: bool | Callable[..., Any] = True,
                 lora_request: AdapterChoice = None) -> list[ClassificationRequestOutput]:
        """Return the probability of each class for each prompt, in `output.outputs.probs`. The model must have a
        classification head."""
        params = replace(pooling_params or pooling.PoolingParams(), task="classify")
        return [pooled.ClassificationRequestOutput.from_pooled(output)
                for output in self._pool(prompts, params, use_tqdm, lora_request)]

    def score(self, data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt], *,
              pooling_params: PoolingParams | None = None, use_tqdm: bool | Callable[..., Any] = True,
              lora_request: AdapterChoice = None, chat_template: str | None = None) -> list[ScoringRequestOutput]:
        """Score each text of `data_2` with the text of `data_1` at the same index, or with its only text. The score is
        the similarity of their embeddings. A model whose head has one class scores the two texts together;
        `chat_template` then joins them, as messages of the roles query and document."""
        first, second = _as_list(data_1), _as_list(data_2)
        if len(first) not in (1, len(second)):
            raise ValueError(f"data_1 has {len(first)} texts and data_2 has {len(second)}: give one in data_1, or as "
                             "many as in data_2")
        checks = self.engine.checks
        if checks.model.classes is not None:
            pairs = checks.join_pairs(first, second, chat_template)
            outputs = self.classify(pairs, pooling_params=pooling_params, use_tqdm=use_tqdm, lora_request=lora_request)
            return [pooled.ScoringRequestOutput(output.request_id, pooled.ScoringOutput(output.outputs.probs[0]),
                                                output.prompt_token_ids) for output in outputs]
        params = pooling.PoolingParams() if pooling_params is None else pooling_params
        if not params.normalize or params.pooling == "all":
            raise ValueError("a score compares one normalised vector of each text: use normalize=True, and pooling "
                             "'last' or 'mean'")
        vectors = self._pool([*first, *second], params, use_tqdm, lora_request)
        ones, others = vectors[: len(first)], vectors[len(first) :]
        if len(ones) == 1:
            ones *= len(others)
        return [pooled.ScoringRequestOutput(other.request_id, pooled.ScoringOutput(pooled.cosine(one, other)),
                                            one.prompt_token_ids + other.prompt_token_ids)
                for one, other in zip(ones, others, strict=True)]

    def score_tokens(self, token_ids: Prompt | Sequence[Prompt], top_k: int = 0,
                     sampling_params: SamplingParams | None = None, *, logprobs_mode: str = "raw",
                     return_kept_ids: bool = False, use_tqdm: bool | Callable[..., Any] = True,
                     lora_request: AdapterChoice = None) -> list[TokenScores]:
        """Return the log-probability of each token of the sequences, given the tokens before it, and those of the
        `top_k` likeliest tokens at its position (-1: of all). `logprobs_mode`: "raw" takes the model's distribution,
        "processed" the one after temperature and filters of `sampling_params`. `return_kept_ids`: also return the
        tokens that the filters keep at each position. In exact mode the values equal, bit for bit, those that sampling
        reports. A sequence may have at most max_model_len - 1 tokens."""
        scoring = token_scores.Scoring.from_arguments(sampling_params, top_k, logprobs_mode, return_kept_ids)
        outputs = self.generate(token_ids, scoring.params, use_tqdm=use_tqdm, lora_request=lora_request)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
        return [scoring.read(output, self.engine.limits.vocab_size) for output in outputs]

    def enqueue(self, prompts: Prompt | Sequence[Prompt],
                sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                use_tqdm: bool | Callable[..., Any] = True, lora_request: AdapterChoice = None,
                priority: int | Sequence[int] | None = None) -> list[str]:
        """Add requests without running them, and return their ids. `wait_for_completion` runs them."""
        params = SamplingParams() if sampling_params is None else sampling_params
        with self._checked(prompts, params, 0 if priority is None else priority, lora_request) as checked:
            ids = self._loop.add(self._queue, checked)
        self._queued += ids
        return ids

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """Run all requests that `enqueue` added, and return their outputs in the same order."""
        ids, self._queued = self._queued, []
        with RequestBar(use_tqdm, len(ids)) as progress:
            done = self._finish(self._queue, progress)
        return [cast(RequestOutput, done[request_id]) for request_id in ids]

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams,
                    lora_request: AdapterChoice = None) -> list[BeamSearchOutput]:
        """Return the likeliest answers of each prompt, found by beam search. `lora_request`: the adapter of all
        prompts, or a list with one or None for each."""
        given = _as_list(prompts)
        beams.check_beam_prompts(given)
        with self._checked(given, SamplingParams(), 0, lora_request) as checked:
            def generate(asked: BeamRound) -> list[RequestOutput]:
                found = self._check(asked.token_ids, asked.sampling, 0)
                return cast(list[RequestOutput], self._run_checked(
                    [replace(beam, parts=checked[prompt].parts)
                     for beam, prompt in zip(found, asked.prompts, strict=True)], use_tqdm=False))

            model = self.engine.model
            return beams.beam_search([request.token_ids for request in checked], params, generate, model.tokenizer,
                                     model.eos_ids, model.limits)

    def follow(self, prompts: Prompt | Sequence[Prompt],
               sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
               priority: int | Sequence[int] = 0, before_step: Callable[[], None] | None = None,
               lora_request: AdapterChoice = None, **misplaced: Never) -> Generator[RequestOutput, None, None]:
        """Like `generate`, but yield each output whenever it has grown. `output_kind` of the parameters says whether an
        output has all tokens or only the new ones. The requests end if the iterator is closed or `before_step`
        raises."""
        if misplaced:
            compat.refuse_misplaced(self.follow, misplaced)
        if before_step is not None and not callable(before_step):
            raise ValueError(f"before_step must be a function or None, got {shown(before_step)}")
        params = SamplingParams() if sampling_params is None else sampling_params
        with self._checked(prompts, params, priority, lora_request) as checked:
            caller = Caller(only_ends=all(request.sampling.output_kind is RequestOutputKind.FINAL_ONLY
                                          for request in checked))
            ids = self._loop.add(caller, checked)
        for request_id, request in zip(ids, checked, strict=True):
            if request.sampling.output_kind is not RequestOutputKind.CUMULATIVE:
                caller.readers[request_id] = OutputReader(request.sampling.output_kind)
        return cast(Generator[RequestOutput, None, None], self._loop.follow(caller, before_step))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
               priority: int = 0, lora_request: LoRARequest | None = None,
               **misplaced: Never) -> Generator[RequestOutput, None, None]:
        """Yield the growing output of one prompt, after each step that adds tokens. For a prompt that cannot be served,
        this call raises ValueError. Closing the iterator ends the request."""
        if misplaced:
            compat.refuse_misplaced(self.stream, misplaced)
        return self.follow([prompt], sampling_params, priority=priority, lora_request=lora_request)

    def chat(self, messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
             use_tqdm: bool | Callable[..., Any] = True, lora_request: AdapterChoice = None, *,
             priority: int | Sequence[int] | None = None, **options: Any) -> list[RequestOutput]:
        """Answer one conversation, or several, which the model's chat template turns into prompts. `options`: see
        `Tokenizer.render_chat`."""
        for name, value in options.items():
            compat.refuse_sampling_field(self.chat, name, value)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(f"messages must be a list of dicts, or a list of such lists, got {shown(messages)}: write "
                             "[{'role': 'user', 'content': 'Hello'}], or give plain text to LLM.generate")
        several = not messages or not isinstance(messages[0], dict)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [self.chat_prompt(c, **options) for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        return self.get_tokenizer().encode_chat(messages, **options)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> str | list[int]:
        """Return the prompt of a conversation, as token ids, or with tokenize=False as text."""
        return self.get_tokenizer().apply_chat_template(messages, **options)

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """Return an LLMEngine around the same engine, for scripts that add requests and make steps themselves."""
        return llm_engine.LLMEngine.inside(self, self._loop)

    def get_metrics(self) -> list[Metric]:
        """Return counts and gauges of the engine since it started, under vLLM's names."""
        return compat.engine_metrics(self.engine, self.engine.model.name)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return new parameters with the default values, which the caller may change and use."""
        return SamplingParams()

    def sleep(self, level: int = 1) -> SleepReport:
        """Free the memory of the weights and the cache until `wake_up`. Level 1 moves the weights to the host's memory
        (on a CPU they stay where they are); level 2 drops them. Running requests are preempted, and all requests wait
        until `wake_up`. Returns how many bytes were freed."""
        return self._loop.run(lambda: self._maintenance.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Bring back the weights and the cache, or only the part in `tags`: "weights" or "kv_cache". Weights that were
        dropped are read again from the model's files. Returns how long it took."""
        return self._loop.run(lambda: self._maintenance.wake_up(tags))

    def is_sleeping(self) -> bool:
        return self._maintenance.is_sleeping

    def update_weights(self, weights: Weights) -> UpdateReport:
        """Replace all weights or some of them. `weights`: torch tensors or numpy arrays by their names in the model's
        checkpoint, or the path of a safetensors file, of a folder with safetensors files, or of a GGUF file. Running
        requests are preempted and go on with the new weights from their tokens so far. If weights do not fit, raises
        ValueError and changes nothing."""
        command = named_weights.weights_command(weights)
        return self._loop.run(lambda: self._maintenance.update_weights(command))

    def start_weight_update(self) -> None:
        """Begin an update of all weights. `load_weights` then replaces them one by one, and `finish_weight_update` ends
        the update. Until then running requests are preempted, and new requests raise WeightsIncomplete."""
        self._loop.run(self._maintenance.start_weight_update)

    def load_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Replace weights, each as soon as it comes, so that none is held twice. Names are those of the model's
        checkpoint, or of `named_parameters()` of the model in transformers. A tensor that does not fit raises
        ValueError. `finish_weight_update` ends the update. If `start_weight_update` was not called, the next
        `reset_prefix_cache`, `wake_up` of the cache, or request ends it. If an update fails or lacks weights, requests
        raise WeightsIncomplete until a complete update has come."""
        self._maintenance.load_weights(weights, self._loop.run)

    def collective_rpc(self, method: str | Callable[..., Any], timeout: float | None = None, args: Sequence[Any] = (),
                       kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Call a method of `worker_extension_cls`, whose object has `model_runner.model.load_weights`. The method runs
        in this process, once for all ranks; the returned list has its result."""
        return self._call_worker(self.load_weights, method, args, kwargs)

    def finish_weight_update(self) -> UpdateReport:
        """End the update that `start_weight_update` began. If weights are missing, raises WeightsIncomplete with their
        names."""
        return self._loop.run(self._maintenance.finish_weight_update)

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Run no step until `resume_generation`; requests that arrive meanwhile wait. `mode`: "abort" ends running
        requests with their outputs so far, "wait" runs them to their ends first, and "keep" stops them where they are.
        If weights change meanwhile, kept requests are computed again under the new weights, or with `clear_cache=False`
        go on with the cache that they have. `clear_cache` also forgets cached pages of requests that have ended."""
        if mode == "wait":
            self._pause_when_done(clear_cache)
        else:
            self._loop.run(lambda: self._maintenance.pause(mode, clears_cache=clear_cache))

    def _pause_when_done(self, clear_cache: bool) -> None:
        wait = self._maintenance.new_wait(clear_cache)
        try:
            self._loop.run(lambda: self._maintenance.begin_wait(wait))
            self._loop.step_until(lambda: self._maintenance.pause_if_done(wait))
        except BaseException:
            self._loop.run(lambda: self._maintenance.withdraw(wait))
            raise

    def resume_generation(self) -> None:
        """Run steps again after `pause_generation`."""
        self._loop.run(self._maintenance.resume)

    def is_paused(self) -> bool:
        return self._maintenance.is_paused

    def weights_checksum(self) -> WeightsChecksum:
        """Return the SHA-256 of each weight, by its name in the checkpoint, and one of all weights together. Equal bits
        have equal checksums, whether they came from files or by `load_weights`. To compare its own tensor, a trainer
        converts the tensor to the dtype that is returned with the checksum. For quantised weights the checksum covers
        their codes (`coded`)."""
        return self._loop.run(self._maintenance.weights_checksum)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached pages except pages of running requests, and return whether all are forgotten.
        `reset_running_requests=True` preempts these requests and forgets their pages too."""
        return self._loop.run(lambda: self._maintenance.reset_prefix_cache(
            reset_running_requests=reset_running_requests))

    def drop_cache_session(self, cache_session: str) -> bool:
        """Delete the pages that the last turn of a `cache_session` has left on the device and in caches beyond it,
        unless they were there before the session or another session has them. Returns False if there is no such
        session."""
        return self._loop.run(lambda: self._maintenance.drop_cache_session(cache_session))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record the engine's work with torch's profiler, until `stop_profile`. Needs the setting profiler_dir."""
        self._profile_dir()
        self._loop.run(lambda: self._maintenance.start_profile(profile_prefix))

    def stop_profile(self) -> str:
        """Write the profile to a file in profiler_dir, for chrome://tracing or Perfetto. Returns its path."""
        folder = self._profile_dir()
        return self._loop.run(lambda: self._maintenance.stop_profile(folder))

    def close(self) -> None:
        """End the engine and give its memory back. `with LLM(...) as llm:` does so too."""
        self.engine.close()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine like `close`. vLLM's engines have this method."""
        self.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, prompts: Prompt | Sequence[Prompt], params: RequestParams | Sequence[RequestParams],
             priority: int | Sequence[int], use_tqdm: bool | Callable[..., Any],
             adapters: AdapterChoice = None) -> list[Output]:
        with self._checked(prompts, params, priority, adapters) as requests:
            return self._run_checked(requests, use_tqdm)

    def _run_checked(self, requests: list[CheckedRequest], use_tqdm: bool | Callable[..., Any]) -> list[Output]:
        """Run requests and return their outputs in the same order."""
        bar = RequestBar(use_tqdm, len(requests))  # a caller's own bar may fail: nothing runs yet
        caller = Caller(only_ends=True)
        with bar as progress:
            ids = self._loop.add(caller, requests)
            done = self._finish(caller, progress)
        return [done[request_id] for request_id in ids]

    def _finish(self, caller: Caller, progress: RequestBar) -> dict[str, Output]:
        """Run all requests of a caller to their ends. Returns the outputs by request id."""
        done: dict[str, Output] = {}
        with closing(self._loop.follow(caller)) as outputs:
            for output in outputs:
                if output.finished:
                    done[output.request_id] = output
                    progress.finish(output)
        return done

    @contextmanager
    def _checked(self, prompts: Prompt | Sequence[Prompt], params: RequestParams | Sequence[RequestParams],
                 priority: int | Sequence[int], adapters: AdapterChoice) -> Generator[list[CheckedRequest], None, None]:
        """Check the prompts and yield the list of requests. The adapters of the requests stay loaded while the block
        runs."""
        checked = self._check(prompts, params, priority)
        if adapters is None:
            yield checked
            return
        with adapter_loading.loaded(self.engine, self._loop.run, checked, adapters) as requests:
            yield requests

    def _check(self, prompts: Prompt | Sequence[Prompt], params: RequestParams | Sequence[RequestParams],
               priority: int | Sequence[int]) -> list[CheckedRequest]:
        given = _as_list(prompts)
        own_params: list[RequestParams] = _per_prompt("sampling_params", params, len(given))
        return self.engine.checks.check_all(given, own_params, _per_prompt("priority", priority, len(given)))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    try:
        given: Any = iter(prompts)
    except TypeError:  # also of a tensor without axes
        given = None
    if given is None or isinstance(prompts, (bytes, bytearray, Set)):  # bytes are no token ids, sets have no order
        raise ValueError(f"prompts must be one or several of a text, token ids and a dict, got {shown(prompts)}")
    items: list[Any] = list(given)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # one prompt as token ids
    return items


def _per_prompt(name: str, given: T | Sequence[T], num: int) -> list[T]:
    """Return a list with one value for each prompt. A single given value is repeated for all prompts."""
    if not isinstance(given, (list, tuple)):
        return [cast(T, given)] * num
    if len(given) != num:
        raise ValueError(f"{len(given)} {name} for {num} prompts: give one, or one for each prompt")
    return list(given)
