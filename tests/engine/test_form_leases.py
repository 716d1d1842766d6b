"""A request leases its compiled form from its check to its end, whatever its end is, and no step compiles a form."""

from __future__ import annotations

import asyncio
import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import OutputIncrement, RequestOutput
from outrider.engine.engine import Engine
from outrider.engine.engine_feature import Caller
from outrider.engine.pause import Pause
from outrider.features.grammars import leases
from outrider.features.grammars.compiled_forms import CompiledForms
from outrider.features.grammars.form_lease import FormLease, FormsBusy
from outrider.features.grammars.leases import FormLeases
from tests.engine.harness import Ask, Rig, byte_tokenizer, prompt_of, tiny_model
from tests.engine.local_compiler import LocalCompiler, compiler_of, forms_of

pytest.importorskip("llguidance")

END = 2
SETTINGS: dict[str, Any] = {"eos_ids": (END,), "max_num_seqs": 2, "poison": False}
NUM_FORMS = 8


def pattern(number: int) -> str:
    return f"{chr(97 + number)}[0-9]{{3,5}}z"


def params(number: int, **fields: Any) -> SamplingParams:
    form = StructuredOutputsParams(regex=pattern(number))
    return SamplingParams(**({"temperature": 1.0, "seed": number, "max_tokens": 12} | fields), structured_outputs=form)


class FormRig(Rig):
    """With the forms of its worker, which a closed worker lets go of."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.forms = forms_of(self.engine)

    def __enter__(self) -> FormRig:
        return self


def lease_of(request: CheckedRequest) -> FormLease:
    lease = request.part(FormLease)
    assert lease is not None
    return lease


def leases_of(rig: FormRig) -> FormLeases:
    return compiler_of(rig.engine).leases


def assert_nothing_is_leased(rig: FormRig) -> None:
    gc.collect()  # errors refer to themselves, and to requests
    own = leases_of(rig)
    assert not [kept for kept in own._kept.values() if kept.is_leased]
    assert own._kept.keys() == rig.forms._compiled.keys() and len(own._kept) <= leases.NUM_KEPT
    assert own._num_bytes == sum(kept.num_bytes for kept in own._kept.values()) and not own._to_drop
    assert own._numbers == {kept.digest: number for number, kept in own._kept.items()}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two forms are kept. Yields the texts that were compiled. No form is compiled while a step runs: nothing else is
    done meanwhile."""
    monkeypatch.setattr(leases, "NUM_KEPT", 2)
    texts: list[str] = []
    compile_, step, is_in_step = CompiledForms._compile, Engine.step, [False]

    def counted(own: CompiledForms, text: str) -> Any:
        assert not is_in_step[0], "a step compiles a form"
        texts.append(text)
        return compile_(own, text)

    def watched(engine: Engine) -> list[OutputIncrement]:
        is_in_step[0] = True
        try:
            return step(engine)
        finally:
            is_in_step[0] = False

    monkeypatch.setattr(CompiledForms, "_compile", counted)
    monkeypatch.setattr(Engine, "step", watched)
    yield texts


def rig_of(**settings: Any) -> FormRig:
    return FormRig(tiny_model("llama"), tokenizer=byte_tokenizer(), **SETTINGS | settings)


def test_more_forms_than_are_kept_are_compiled_once_and_in_no_step(compiled: list[str]) -> None:
    """Most of the requests wait, and all are preempted once."""
    asks = [Ask(prompt_of(number, 5), params(number)) for number in range(NUM_FORMS)]
    with rig_of() as rig:
        for output, number in zip(rig.run(asks, after_step=rig.preempt), range(NUM_FORMS), strict=True):
            assert output.outputs[0].error is None and output.metrics.num_preemptions == 1
            assert re.fullmatch(pattern(number), bytes(output.outputs[0].token_ids[:-1]).decode())
        assert len(compiled) == len(set(compiled)) == NUM_FORMS
        assert_nothing_is_leased(rig)


# Ways of ending. Each gets an engine in which two requests run and one waits.


def finish(rig: FormRig, requests: dict[str, CheckedRequest]) -> None:
    while rig.engine.has_work:
        rig.engine.step()


def abort(rig: FormRig, requests: dict[str, CheckedRequest]) -> None:
    rig.engine.abort_all()
    finish(rig, requests)


def abort_paused(rig: FormRig, requests: dict[str, CheckedRequest]) -> None:
    rig.engine.rest()
    rig.engine.pause = Pause("a test")
    rig.engine.abort_all()
    rig.engine.step()
    rig.engine.pause = Pause()


def preempt(rig: FormRig, requests: dict[str, CheckedRequest]) -> None:
    rig.engine.rest()
    assert all(own.live for own in leases_of(rig)._kept.values())
    finish(rig, requests)


def fail(rig: FormRig, requests: dict[str, CheckedRequest]) -> None:
    def broken(*given: Any, **more: Any) -> Any:
        raise ValueError("a fault of this test")

    rig.step.forward = broken  # type: ignore[method-assign]
    finish(rig, requests)


def reset(rig: FormRig, requests: dict[str, CheckedRequest]) -> None:
    """One of the requests goes on, from its beginning."""
    rig.engine.reset()
    rig.engine.resume("0", requests["0"], {0: []})
    rig.engine.drop_unused()
    requests.clear()
    gc.collect()
    (own,) = [kept for kept in leases_of(rig)._kept.values() if kept.is_leased]
    assert len(own.live) == 1
    finish(rig, requests)


def reset_twice(rig: FormRig, requests: dict[str, CheckedRequest]) -> None:
    """An interrupt comes while the engine is being reset."""
    rig.engine.reset()
    rig.engine.resume("1", requests["1"], {0: []})
    reset(rig, requests)


def close(rig: FormRig, requests: dict[str, CheckedRequest]) -> None:
    rig.engine.close()


@pytest.mark.parametrize("end", [finish, abort, abort_paused, preempt, fail, reset, reset_twice, close])
def test_leases_are_given_back(end: Callable[[FormRig, dict[str, CheckedRequest]], None], compiled: list[str]) -> None:
    with rig_of() as rig:
        given = {str(number): rig.engine.checks.check(prompt_of(number, 5), params(number, n=1 + (number == 2)))
                 for number in range(3)}
        requests = dict(rig.engine.add(given))
        for _ in range(3):
            rig.engine.step()
        assert len(leases_of(rig)._kept) == len(compiled) == 3
        end(rig, requests)
        assert_nothing_is_leased(rig)  # though this test still has the requests
        assert not rig.engine.num_requests or end is close


def test_requests_that_are_refused_or_never_added_lease_nothing(compiled: list[str],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*requests: Any) -> None:
        raise ValueError("a refusal of this test")

    with rig_of() as rig:
        first = rig.engine.checks.check("a", params(0))
        assert [len(kept.checked) for kept in leases_of(rig)._kept.values()] == [1]
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="a refusal"):
            patch.setattr(rig.engine.scheduler, "add", full)
            rig.engine.add({"0": first})
        assert_nothing_is_leased(rig)
        with pytest.raises(ValueError, match="the prompt is empty"):
            rig.engine.checks.check_all(["a", []], [params(1)] * 2, [0, 0])
        assert_nothing_is_leased(rig)
        for number in range(2, 5):
            rig.engine.checks.check("a", params(number))
        with pytest.raises(FormsBusy, match="compiled grammar has been dropped: send the request again"):
            rig.engine.add({"0": first})
        assert not rig.engine.num_requests
        assert_nothing_is_leased(rig)


def test_a_request_of_an_engine_that_has_ended_is_refused_by_the_next_one(compiled: list[str]) -> None:
    """The number of its form is that of another form there."""
    with rig_of() as before, rig_of() as rig:
        old, new = before.engine.checks.check("a", params(0)), rig.engine.checks.check("a", params(1))
        assert lease_of(old).number == lease_of(new).number
        with pytest.raises(FormsBusy):
            rig.engine.add({"0": new, "1": old})
        rig.engine.add({"0": new})
        finish(rig, {})
        del old, new
        assert_nothing_is_leased(rig)


def test_an_interrupt_after_a_form_is_kept_does_not_drop_it(compiled: list[str],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    make_room = FormLeases._make_room

    def interrupted(self: FormLeases) -> None:
        monkeypatch.setattr(FormLeases, "_make_room", make_room)
        raise KeyboardInterrupt

    with rig_of() as rig:
        monkeypatch.setattr(FormLeases, "_make_room", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.engine.checks.check("a", params(0))
        rig.engine.add({"0": rig.engine.checks.check("a", params(0))})
        finish(rig, {})


def test_leases_of_an_asyncio_front_end_with_its_readers_and_with_the_engine(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "NUM_KEPT", 2)

    async def main(rig: FormRig) -> None:
        async with AsyncLLM.around(rig.engine) as llm:
            async for _ in llm.generate("a", params(0, max_tokens=None)):
                break
            async for _ in llm.generate("a", params(1)):
                pass
            await asyncio.wrap_future(llm._owner.call(lambda: None))
            while await asyncio.wrap_future(llm._owner.call(lambda: rig.engine.has_work)):
                pass
            assert_nothing_is_leased(rig)
            outputs = llm.generate("a", params(2))
            await anext(outputs)
            llm.fail("a fault of this test")
            with pytest.raises(Exception, match="a fault of this test"):
                async for _ in outputs:
                    pass
        assert_nothing_is_leased(rig)

    with rig_of() as rig:
        asyncio.run(main(rig))


def test_an_interrupt_gives_back_what_its_call_leased(compiled: list[str]) -> None:
    with rig_of() as rig:
        llm = LLM.around(rig.engine)
        running, lost = llm.stream("a", params(0)), llm.stream("a", params(1))
        next(running)

        def interrupted() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            llm._loop.run(interrupted)
        lost.close()
        *_, last = running
        assert re.fullmatch(pattern(0), last.outputs[0].text)
        assert_nothing_is_leased(rig)


def test_a_client_that_holds_its_part_is_refused_and_others_are_not(compiled: list[str],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASED", 4)
    own = LocalCompiler(byte_tokenizer, (END,))

    def check(number: int, client: str | None) -> FormLease:
        form = StructuredOutputsParams(regex=pattern(number))
        return own.check(form, None if client is None else Caller(client))

    held = [check(number, "a") for number in range(4)]
    with pytest.raises(FormsBusy, match="use 4 compiled grammars, .*: try again"):
        check(4, "a")
    assert len(compiled) == 4, "what is refused is not compiled"
    others = [check(number, "b") for number in (5, 6)]
    held.append(check(0, "a"))
    with pytest.raises(FormsBusy, match="use 2 compiled grammars"):
        check(7, "b")
    others.append(check(0, None))  # the program itself has no bound
    del held, others
    assert check(4, "a").client == "a" and len(own.leases._kept) <= leases.NUM_KEPT + 1


def test_a_form_that_is_as_large_as_the_bound_keeps_out_no_other_client(compiled: list[str]) -> None:
    own, large = FormLeases(lambda number: None), leases.LEASED_BYTES
    first = own.keep(b"0", 0, large, "a")
    second = own.keep(b"1", 1, large, "b")
    with pytest.raises(FormsBusy):
        own.keep(b"2", 2, 1, "b")
    assert first.number == 0 and second.number == 1


class Case:
    """Random requests that come, end, are preempted and brought back, in one engine."""

    def __init__(self, rig: FormRig, seed: int) -> None:
        self.rig, self.draw, self.names = rig, Random(seed), iter(map(str, range(10**6)))
        self.checked: list[tuple[int, CheckedRequest]] = []
        self.followed: dict[str, tuple[int, CheckedRequest, RequestOutput]] = {}
        self.num_refused = self.num_finished = 0

    def check(self) -> None:
        form, client = self.draw.randrange(NUM_FORMS), self.draw.choice(["a", "a", "b", None])
        caller = None if client is None else Caller(client)
        try:
            (request,) = self.rig.engine.checks.check_all(
                [prompt_of(form, 5)], [params(form, n=self.draw.choice([1, 1, 2]))], [0], caller)
        except FormsBusy:
            self.num_refused += 1
            return
        self.checked.append((form, request))

    def add(self) -> None:
        if not self.checked:
            return
        form, request = self.checked.pop(self.draw.randrange(len(self.checked)))
        if self.draw.random() < 0.2:
            return  # it is never added
        name = next(self.names)
        (queued,) = self.rig.engine.add({name: request}).values()
        output = RequestOutput.empty(name, None, list(request.token_ids), request.sampling)
        self.followed[name] = form, queued, output

    def step(self) -> None:
        for increment in self.rig.engine.step():
            name = increment.sample.request_id
            form, _, output = self.followed[name]
            output.grow(increment)
            if output.finished:
                del self.followed[name]
                for sample in output.outputs:
                    assert sample.error is None
                    if sample.finish_reason == "stop":
                        self.num_finished += 1
                        assert re.fullmatch(pattern(form), bytes(sample.token_ids[:-1]).decode())

    def abort(self) -> None:
        if self.followed:
            self.rig.engine.abort(self.draw.choice(sorted(self.followed)))

    def preempt(self) -> None:
        if running := list(self.rig.engine.scheduler._running):
            self.rig.engine.scheduler._preempt(self.draw.choice(running))

    def reset(self) -> None:
        self.rig.engine.reset()
        for name, (_, queued, output) in list(self.followed.items()):
            if self.draw.random() < 0.3:
                del self.followed[name]
            else:
                self.rig.engine.resume(name, queued, output.cut_back())
        self.rig.engine.drop_unused()

    def assert_leases_are_right(self) -> None:
        own, live = leases_of(self.rig), Counter[FormLease]()
        for request in self.rig.engine._requests._live.values():
            live[lease_of(request.asked)] += 1
        assert sum((kept.live for kept in own._kept.values()), Counter()) == live
        assert all(own._kept[lease.number].live[lease] for lease in live)
        waiting = [lease_of(request) for _, request in self.checked]
        for lease in (*live, *filter(None, waiting)):
            assert self.rig.forms._compiled[lease.number].done()
            assert own._numbers[lease.digest] == lease.number
        for client in ("a", "b"):
            num_held = sum(kept.is_leased_by(client) for kept in own._kept.values())
            assert num_held <= leases.MAX_LEASED


@pytest.mark.parametrize("seed", range(6))
def test_random_orders_of_coming_and_ending(seed: int, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASED", 3)
    with rig_of(max_num_seqs=3, overlap=seed % 2 == 0) as rig:
        case = Case(rig, seed)
        actions = [case.check] * 6 + [case.add] * 6 + [case.step] * 16 + [case.abort, case.preempt, case.reset]
        for _ in range(300):
            case.draw.choice(actions)()
            case.assert_leases_are_right()
        case.checked.clear()
        while rig.engine.has_work:
            case.step()
            case.assert_leases_are_right()
        assert not case.followed and case.num_finished > 5 and case.num_refused > 5
        assert_nothing_is_leased(rig)
