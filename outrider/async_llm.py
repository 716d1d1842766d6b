"""AsyncLLM: the engine for asyncio programs. One thread owns the engine; coroutines send it commands and get outputs.

If a request fails, the coroutine that reads its outputs gets the error. If the engine fails, all readers get the error.
This file contains no HTTP code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Never, cast

from outrider.adapter_loading import load, need_adapters, with_adapter
from outrider.compat.misplaced_arguments import refuse_misplaced, refuse_sampling_field
from outrider.core import Output, RequestParams, empty_output
from outrider.core.checked_request import CheckedRequest
from outrider.core.fields import Text, check_value
from outrider.core.output_reader import OutputReader
from outrider.core.outputs import OutputIncrement, RequestOutput
from outrider.core.params import SamplingParams, need_sampling_params
from outrider.core.prompts import Prompt
from outrider.engine.engine import Engine
from outrider.engine.engine_feature import Caller
from outrider.engine.engine_thread import EngineThread, tell
from outrider.engine.named_weights import Weights, weights_command
from outrider.engine.reader_streams import GrowingOutput, Increments, ParamsError, RequestError, Stream
from outrider.engine.worker_line import EngineError
from outrider.feature_list import is_slow_prompt
from outrider.front import Front
from outrider.lora_request import LoadedAdapter, LoRARequest, one_for_each
from outrider.pooling_outputs import PoolingRequestOutput, as_tensors
from outrider.pooling_params import PoolingParams
from outrider.runner.commands import SleepReport, UpdateReport, WakeReport, WeightsIncomplete

if TYPE_CHECKING:
    from outrider.runner.commands import WeightsChecksum

__all__ = ["LONG_TEXT", "AsyncLLM", "EngineError", "ParamsError", "RequestError", "WeightsIncomplete"]

PAUSE_SECONDS = 0.01  # between two looks at requests that must end before a pause
LONG_TEXT = 20_000  # characters from which tokenizing leaves the event loop
SHORT_TEXT = 100  # characters of a text that takes about as long as any shorter one


class AsyncLLM(Front):
    """`async for output in llm.generate(prompt, params)` yields the output of one prompt as it grows.

    Leaving the loop, or cancelling the task in it, aborts the request."""

    _streams = True

    def _start(self, engine: Engine) -> None:
        super()._start(engine)  # the engine is read-only outside its thread
        self._ids = count()
        self._held_back: set[Stream] = set()  # of requests that come while another call waits for the ends of others
        self._owner = EngineThread(engine)

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                       request_id: str | None = None, *, lora_request: LoRARequest | None = None, priority: int = 0,
                       **misplaced: Never) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing output of one prompt; the last output is finished. `output_kind` of the parameters says
        whether an output has all tokens so far or only the new ones. Raises ValueError for a request that cannot be
        served."""
        refuse_misplaced(self.generate, misplaced)
        params = need_sampling_params(SamplingParams() if sampling_params is None else sampling_params)
        async with aclosing(self._grow(prompt, params, request_id, priority, lora_request)) as outputs:
            async for output in outputs:
                yield cast(RequestOutput, output)

    async def encode(self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None,
                     *, lora_request: LoRARequest | None = None,
                     priority: int = 0) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool the hidden states of one prompt. The last output has the result, as a torch tensor."""
        params = PoolingParams() if pooling_params is None else pooling_params
        async with aclosing(self._grow(prompt, params, request_id, priority, lora_request)) as outputs:
            async for output in outputs:
                as_tensors([cast(PoolingRequestOutput, output)])
                yield cast(PoolingRequestOutput, output)

    async def check(self, prompts: Sequence[Prompt], params: RequestParams, priority: int = 0,
                    lora_request: LoRARequest | None = None, tenant: str | None = None) -> list[CheckedRequest]:
        """Make one checked request for each prompt. Raises ValueError if one cannot be served. Grammars are compiled,
        long texts tokenized and missing adapters loaded without holding up the engine. tenant: the customer whose
        requests these are. Tenants share the engine equally, and `priority` orders the requests of one tenant."""
        checked = await self._check(prompts, params, priority, tenant or "")
        checked = [replace(request, tenant=tenant) for request in checked]
        (asked,) = one_for_each(lora_request, 1)
        if asked is None:
            return checked
        adapters = need_adapters(self.engine)
        hold = await load(adapters, self._owner.call, lambda: adapters.begin(asked))
        self._owner.call(lambda: adapters.release(hold))
        return [with_adapter(request, hold.number) for request in checked]

    @asynccontextmanager
    async def holding_adapter(self, request: CheckedRequest) -> AsyncGenerator[CheckedRequest, None]:
        """Keep the adapter of a request loaded while the block runs. Yields the request with the current load of the
        adapter: since the check, the adapter may have been read again, or evicted."""
        checked = request.part(LoadedAdapter)
        if checked is None:
            yield request
            return
        adapters = need_adapters(self.engine)
        hold = await load(adapters, self._owner.call, lambda: adapters.hold(checked.number))
        try:
            yield with_adapter(request, hold.number)
        finally:
            self._owner.call(lambda: adapters.release(hold))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, so that its first request need not wait for it."""
        adapters = need_adapters(self.engine)
        hold = await load(adapters, self._owner.call, lambda: adapters.begin(lora_request))
        await asyncio.wrap_future(self._owner.call(lambda: adapters.release(hold)))
        return True

    async def remove_lora(self, lora_name: str) -> bool:
        """Stop serving an adapter: no new request may name it; running requests keep it until they end. Raises
        UnknownAdapter if no adapter has this name."""
        adapters = need_adapters(self.engine)
        await asyncio.wrap_future(self._owner.call(lambda: adapters.remove(lora_name)))
        return True

    async def _check(self, prompts: Sequence[Prompt], params: RequestParams, priority: int,
                     client: str) -> list[CheckedRequest]:
        checks, num, is_gone = self.engine.checks, len(prompts), Event()

        def check() -> list[CheckedRequest]:
            caller = Caller(client, is_gone.is_set)
            return checks.check_all(prompts, [params] * num, [priority] * num, caller)

        if (started := checks.features.start_check(check, params, client)) is not None:
            try:
                return await asyncio.wrap_future(started)
            finally:
                is_gone.set()  # nobody waits for a check that is cancelled
        return await asyncio.to_thread(check) if _take_long(prompts, params) else check()

    async def increments(self, request: CheckedRequest,
                         request_id: str | None = None) -> AsyncGenerator[list[OutputIncrement], None]:
        """Yield lists of increments of a request. An increment is the output that one step has added to one sample. A
        list has all increments since the reader's last read. Nothing is copied."""
        stream = Increments(self._name_request(request_id), asyncio.get_running_loop(), request.num_samples)
        async with self._opened(stream, request):
            while not stream.is_done:
                yield await stream.next()

    async def follow(self, request: CheckedRequest, request_id: str | None = None) -> AsyncGenerator[Output, None]:
        """Run a request and yield its growing output."""
        output = empty_output(self._name_request(request_id), request)
        reader = OutputReader(request.sampling.output_kind)
        stream = GrowingOutput(output, reader, asyncio.get_running_loop())
        async with self._opened(stream, request):
            while not stream.is_done:
                yield await stream.next()

    async def _grow(self, prompt: Prompt, params: RequestParams, request_id: str | None, priority: int,
                    lora_request: LoRARequest | None) -> AsyncGenerator[Output, None]:
        (request,) = await self.check([prompt], params, priority, lora_request)
        async with aclosing(self.follow(request, request_id)) as outputs:
            async for output in outputs:
                yield output

    @asynccontextmanager
    async def _opened(self, stream: Stream, request: CheckedRequest) -> AsyncGenerator[None, None]:
        """Run the request while the block runs. The stream receives its outputs. A request that has not ended by then
        is aborted."""
        if self.engine.pause.is_coming:
            await self._hold_back(stream)
        async with self.holding_adapter(request) as kept:
            self._owner.open(stream, kept)
        try:
            if stream.is_aborted:
                await self.abort(stream.request_id)
            yield
        finally:
            self._owner.leave(stream)

    async def _hold_back(self, stream: Stream) -> None:
        """Wait while a requested pause has not begun yet, so that a new request does not delay the pause. Returns early
        if the request is aborted."""
        self._held_back.add(stream)
        try:
            while self.engine.pause.is_coming and self.is_running and not stream.is_aborted:
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._held_back.remove(stream)

    def _name_request(self, request_id: str | None) -> str:
        request_id = f"async-{next(self._ids)}" if request_id is None else request_id
        check_value("request_id", Text, request_id)
        return request_id

    async def chat(self, messages: Sequence[dict[str, Any]], sampling_params: SamplingParams | None = None, *,
                   request_id: str | None = None, priority: int = 0, lora_request: LoRARequest | None = None,
                   **options: Any) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing answer to one conversation, which the model's chat template turns into a prompt."""
        for name, value in options.items():
            refuse_sampling_field(self.chat, name, value)
        prompt = await asyncio.to_thread(self.chat_prompt, messages, **options)
        async with aclosing(self.generate(prompt, sampling_params, request_id=request_id, priority=priority,
                                          lora_request=lora_request)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one request or several. The reader of a request gets its tokens so far, with finish_reason "abort". An
        unknown id is no error."""
        if not isinstance(request_id, str) and isinstance(request_id, Iterable):
            for each in request_id:
                await self.abort(each)
            return
        check_value("request_id", Text, request_id)
        for stream in list(self._held_back):
            stream.is_aborted |= stream.request_id == request_id
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        self._owner.abort(request_id, lambda: tell(loop, _resolve, done))
        await done

    async def abort_matching(self, matches: Callable[[str], bool]) -> int:
        """End the requests whose ids match, and return how many there were. See `abort`."""
        held = [stream for stream in self._held_back if matches(stream.request_id)]
        for stream in held:
            stream.is_aborted = True
        return len(held) + await asyncio.wrap_future(self._owner.call(lambda: self.engine.abort_all(matches)))

    async def sleep(self, level: int = 1) -> SleepReport:
        """Free the memory of the weights and the cache until `wake_up`; requests wait meanwhile. See `LLM.sleep`."""
        return await asyncio.wrap_future(self._owner.call(lambda: self._maintenance.sleep(level)))

    async def wake_up(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Bring back the weights and the cache, or only the part in `tags`: "weights" or "kv_cache"."""
        return await asyncio.wrap_future(self._owner.call(lambda: self._maintenance.wake_up(tags)))

    async def is_sleeping(self) -> bool:
        return self._maintenance.is_sleeping

    async def update_weights(self, weights: Weights) -> UpdateReport:
        """Replace all weights or some of them. Their names are those of the model's checkpoint. See
        `LLM.update_weights`."""
        command = await asyncio.to_thread(weights_command, weights)
        return await asyncio.wrap_future(self._owner.call(lambda: self._maintenance.update_weights(command)))

    async def start_weight_update(self) -> None:
        """Begin an update of all weights, which `finish_weight_update` ends. See `LLM.start_weight_update`."""
        await asyncio.wrap_future(self._owner.call(self._maintenance.start_weight_update))

    async def load_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Replace weights, each as soon as it comes from the iterable, which is read in another thread. See
        `LLM.load_weights`."""
        def run(action: Callable[[], None]) -> None:
            self._owner.call(action).result()

        await asyncio.to_thread(self._maintenance.load_weights, weights, run)

    async def collective_rpc(self, method: str | Callable[..., Any], timeout: float | None = None,
                             args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Call a method of `worker_extension_cls` in a thread of this process. See `LLM.collective_rpc`."""
        def load_weights(weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
            self._maintenance.load_weights(weights, lambda action: self._owner.call(action).result())

        return await asyncio.to_thread(self._call_worker, load_weights, method, args, kwargs)

    @property
    def output_processor(self) -> SimpleNamespace:
        """The object with which OpenRLHF asks how many requests have not ended."""
        return SimpleNamespace(get_num_unfinished_requests=lambda: self.engine.num_requests)

    async def finish_weight_update(self) -> UpdateReport:
        """End the update that `start_weight_update` began. See `LLM.finish_weight_update`."""
        return await asyncio.wrap_future(self._owner.call(self._maintenance.finish_weight_update))

    @property
    def has_weight_update(self) -> bool:
        """Whether an update that `start_weight_update` began has not ended yet."""
        return self._maintenance.has_session

    async def weights_checksum(self) -> WeightsChecksum:
        """Return the SHA-256 of each weight under its name in the checkpoint. See `LLM.weights_checksum`."""
        return await asyncio.wrap_future(self._owner.call(self._maintenance.weights_checksum))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached pages except pages of running requests. `reset_running_requests=True` preempts these
        requests and forgets their pages too."""
        return await asyncio.wrap_future(self._owner.call(lambda: self._maintenance.reset_prefix_cache(
            reset_running_requests=reset_running_requests)))

    async def drop_cache_session(self, cache_session: str | tuple[str, str]) -> bool:
        """Delete the pages of the last turn of a `cache_session`. See `LLM.drop_cache_session`."""
        return await asyncio.wrap_future(self._owner.call(
            lambda: self._maintenance.drop_cache_session(cache_session)))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Run no step until `resume_generation`; requests that arrive meanwhile wait. See `LLM.pause_generation`."""
        maintenance = self._maintenance
        if mode == "wait":
            await self._pause_when_done(clear_cache)
        else:
            await asyncio.wrap_future(self._owner.call(lambda: maintenance.pause(mode, clears_cache=clear_cache)))
        # Until readers have got what the last steps added.
        while maintenance.is_paused and await asyncio.wrap_future(self._owner.call(lambda: self.engine.has_work)):
            pass

    async def _pause_when_done(self, clear_cache: bool) -> None:
        maintenance, wait = self._maintenance, self._maintenance.new_wait(clear_cache)
        try:
            await asyncio.wrap_future(self._owner.call(lambda: maintenance.begin_wait(wait)))
            while not await asyncio.wrap_future(self._owner.call(lambda: maintenance.pause_if_done(wait))):
                await asyncio.sleep(PAUSE_SECONDS)
        except BaseException:
            with suppress(EngineError):  # an engine that has ended holds back no request
                self._owner.call(lambda: maintenance.withdraw(wait))
            raise

    async def resume_generation(self) -> None:
        """Run steps again after `pause_generation`."""
        await asyncio.wrap_future(self._owner.call(self._maintenance.resume))

    async def is_paused(self) -> bool:
        return self._maintenance.is_paused

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record the engine's work with torch's profiler, until `stop_profile`. See `LLM.start_profile`."""
        self._profile_dir()
        await asyncio.wrap_future(self._owner.call(lambda: self._maintenance.start_profile(profile_prefix)))

    async def stop_profile(self) -> str:
        """Write the profile to a file in profiler_dir. Returns its path."""
        folder = self._profile_dir()
        return await asyncio.wrap_future(self._owner.call(lambda: self._maintenance.stop_profile(folder)))

    @property
    def is_running(self) -> bool:
        """Whether the engine serves requests: it was not shut down and has not failed."""
        return self._owner.error is None

    @property
    def errored(self) -> bool:
        return not self.is_running

    async def check_health(self) -> None:
        """Raise the error that ended the engine, if one did."""
        if self._owner.error is not None:
            raise self._owner.error

    def fail(self, reason: str) -> None:
        """End an engine that can no longer serve, as if a step had failed: requests raise EngineError."""
        self._owner.fail(reason)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine, after the step in flight. Requests that still run raise EngineError."""
        self._owner.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)


def _size_of(params: RequestParams) -> int:
    """Estimate the work of checking parameters: the number of token ids and characters in their lists. Each bad word
    counts as many characters, because it is tokenized alone, twice."""
    if not isinstance(params, SamplingParams):
        return 0
    lists = (params.allowed_token_ids, params.stop_token_ids, params.logit_bias, params.bad_words)
    *ids, words = [own if isinstance(own, list | dict) else () for own in lists]  # others are refused by the check
    return sum(map(len, ids)) + sum(SHORT_TEXT + len(word) for word in words if isinstance(word, str))


def _take_long(prompts: Sequence[Prompt], params: RequestParams) -> bool:
    """Whether checking these requests takes long, so that it must not run on the event loop: texts and bad words are
    tokenized, and a feature may have work to do."""
    num = _size_of(params)
    for prompt in prompts:
        if isinstance(prompt, dict):
            if is_slow_prompt(prompt):
                return True
            given = prompt.get("prompt_token_ids") or prompt.get("prompt")
        else:
            given = prompt
        num += len(given) if isinstance(given, (str, list, tuple)) else 0
    return num > LONG_TEXT


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
