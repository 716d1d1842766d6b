"""Grammars that take long or much memory are refused within bounds, in a process of their own that can be ended, and
delay nobody else's."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from outrider.core.structured import StructuredOutputsParams
from outrider.engine.engine_feature import Caller
from outrider.features.grammars import check_threads, compile_process, limits, trial
from outrider.features.grammars.check_threads import CheckThreads
from outrider.features.grammars.form_lease import FormLease, FormsBusy
from outrider.features.grammars.turns import MOST_AT_ONCE, CompileTurns
from tests.engine.harness import byte_tokenizer
from tests.engine.local_compiler import LocalCompiler

pytest.importorskip("llguidance")

END = 257
# Each further pattern doubles what llguidance computes before it looks at its limits again.
ENDLESS = "start: A\nA: " + " & ".join(f"/(.*a){{{count}}}.*/" for count in range(1, 30))
PATIENCE = 60.0


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields).to_plain()


def compiler() -> LocalCompiler:
    return LocalCompiler(byte_tokenizer, (END,))


def children(own: LocalCompiler) -> list[int]:
    """Processes that the compile process has forked and not yet buried."""
    link = own._trial._process._link
    assert link is not None
    path = f"/proc/{link._process.pid}/task/{link._process.pid}/children"
    with open(path) as text:
        return [int(child) for child in text.read().split()]


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


needs_proc = pytest.mark.skipif(not os.path.exists(f"/proc/self/task/{os.getpid()}/children"), reason="needs /proc")


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CPU_SECONDS", 1)


@needs_proc
def test_a_grammar_that_never_ends_is_ended(short_time: None) -> None:
    own = compiler()
    own.check(form(regex="a+"))
    before = time.process_time()
    with pytest.raises(ValueError, match=r"structured_outputs.grammar takes (longer|too much memory)"):
        own.check(form(grammar=ENDLESS))
    assert time.process_time() - before < 0.5, "it was compiled in this process"
    assert children(own) == [], "it is still being compiled"
    own.check(form(regex="b+"))


def test_a_grammar_that_was_refused_is_not_compiled_again(short_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SLOW_CPU_SECONDS", 0.0)
    own, num_runs, run = compiler(), [], compile_process.CompileProcess.run

    def counted(*given: Any, **more: Any) -> Any:
        num_runs.append(given)
        return run(*given, **more)

    monkeypatch.setattr(compile_process.CompileProcess, "run", counted)
    for _ in range(3):
        with pytest.raises(ValueError, match="takes"):
            own.check(form(grammar=ENDLESS))
    assert len(num_runs) == 1


def test_a_grammar_that_takes_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_BYTES", 4 << 20)
    own = compiler()
    own.check(form(regex="a+"))
    with pytest.raises(ValueError, match="structured_outputs.json takes too much memory to compile"):
        own.check(form(json={"enum": [f"x{i:07d}" for i in range(20_000)]}))
    monkeypatch.setattr(trial, "MAX_FORM_BYTES", -1)
    with pytest.raises(ValueError, match="too much memory"):
        own.check(form(regex="b+"))


def test_grammars_of_one_client_delay_no_other(short_time: None) -> None:
    own, is_over, errors = compiler(), threading.Event(), []
    own.check(form(regex="a+"))

    def attack(number: int) -> None:
        while not is_over.is_set():
            try:
                own.check(form(grammar=f"{ENDLESS}\n// {number}"), Caller("hostile", is_over.is_set))
            except ValueError as error:
                errors.append(error)
                number += 100

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        for count in range(1, 9):
            own.check(form(json={"type": "array", "maxItems": count}), Caller("victim"))
        assert len(errors) < 50, "the attack was over at once"
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert errors


@needs_proc
def test_a_client_that_has_gone_leaves_nothing_behind() -> None:
    own, is_gone, found = compiler(), threading.Event(), []

    def check() -> None:
        with pytest.raises(FormsBusy) as error:
            own.check(form(grammar=ENDLESS), Caller("a", is_gone.is_set))
        found.append(error.value)

    own.check(form(regex="a+"))
    thread = threading.Thread(target=check)
    thread.start()
    eventually(lambda: bool(children(own)))
    is_gone.set()
    thread.join()
    assert found
    eventually(lambda: not children(own))


def test_the_compile_process_starts_with_the_first_grammar_and_again_after_its_end() -> None:
    own = compiler()
    assert own._trial._process._link is None
    own.check(form(regex="a+"))
    link = own._trial._process._link
    assert link is not None
    link._process.kill()
    own.check(form(regex="b+"))
    again = own._trial._process._link
    assert again is not None and again is not link
    process = again._process
    del own, again
    gc.collect()  # the error of the first process's end refers to itself
    eventually(lambda: process.poll() is not None)


def test_equal_forms_that_come_together_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own, texts, run = compiler(), [], compile_process.CompileProcess.run
    leases: list[FormLease] = []

    def counted(process: Any, kind: str, text: str, *rest: Any) -> Any:
        texts.append(text)
        time.sleep(0.05)
        return run(process, kind, text, *rest)

    monkeypatch.setattr(compile_process.CompileProcess, "run", counted)
    threads = [threading.Thread(target=lambda: leases.append(own.check(form(regex="abc")))) for _ in range(300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 1 and len(leases) == 300 and {lease.number for lease in leases} == set(own.forms._compiled)


def test_nobody_waits_for_the_turn_of_another_client_that_asks_for_an_equal_form() -> None:
    own, is_over = compiler(), threading.Event()
    own.check(form(regex="a+"))
    with own._trial._turns.turn("hostile"):  # it compiles something else, for long
        def wait() -> None:
            with pytest.raises(FormsBusy):
                own.check(form(regex="b+"), Caller("hostile", is_over.is_set))

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: bool(own._trial._turns._waiting))
        try:
            own.check(form(regex="b+"), Caller("victim"))
        finally:
            is_over.set()
            thread.join()


def test_a_client_has_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are the whole process's: a client that could start any number would leave none to others."""
    monkeypatch.setattr(check_threads, "MOST_THREADS", 3)
    own, goes_on, before = CheckThreads(), threading.Event(), threading.active_count()
    checks = [own.start(partial(goes_on.wait, PATIENCE), "hostile") for _ in range(50)]
    checks[40].cancel()
    assert threading.active_count() <= before + 3
    assert own.start(partial(int, "7"), "victim").result(PATIENCE) == 7
    goes_on.set()
    assert all(check.cancelled() or check.result(PATIENCE) for check in checks)
    eventually(lambda: not own._running and not own._lines)


@pytest.mark.parametrize("num_properties", [500, 2000])
def test_an_object_with_many_optional_properties_works_or_is_refused_with_the_reason(num_properties: int) -> None:
    own = compiler()
    asked = form(json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(num_properties)}})
    if num_properties > 600:
        with pytest.raises(ValueError, match=r"structured_outputs.json cannot be compiled: .* 8007 items; max is 2500"):
            own.check(asked)
        return
    matcher = own.forms.start(own.check(asked).number).result()
    matcher.advance(list(b'{"p3": 5, "p499": 7}'))
    assert matcher.error is None and matcher.inner.is_accepting()


def test_a_matcher_at_its_limits_says_so_and_blames_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ITEMS_IN_ROW", 50)
    asked = form(json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(90)}})
    own = compiler()
    own.prepare(0, asked).result()
    matcher = own.forms.start(0).result()
    matcher.advance(list(b'{"p'))
    assert matcher.error is not None and "items; max is 50" in matcher.error


# Turns


def test_clients_take_turns() -> None:
    turns, order, begun = CompileTurns(), [], threading.Event()

    def wait(name: str) -> None:
        with turns.turn(name):
            order.append(name)
            assert begun.wait(PATIENCE)

    def start(name: str) -> threading.Thread:
        thread = threading.Thread(target=wait, args=(name,))
        thread.start()
        return thread

    def num_waiting() -> int:
        return sum(map(len, turns._waiting.values()))

    threads = [start(f"busy{i}") for i in range(MOST_AT_ONCE)]
    eventually(lambda: len(order) == MOST_AT_ONCE)
    for i, name in enumerate(["a", "a", "a", "b"]):
        threads.append(start(name))
        eventually(lambda i=i: num_waiting() == i + 1)
    begun.set()
    for thread in threads:
        thread.join()
    assert sorted(order[MOST_AT_ONCE:]) == ["a", "a", "a", "b"]
    assert "b" in order[MOST_AT_ONCE:MOST_AT_ONCE + 2]
    assert not turns._waiting and not turns._running


def test_too_many_waiting_forms_of_a_client_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, goes_on = CompileTurns(), threading.Event()
    monkeypatch.setattr("outrider.features.grammars.turns.MOST_WAITING", 1)
    monkeypatch.setattr("outrider.features.grammars.turns.WAIT_SECONDS", 0.2)
    with turns.turn("a"):
        def wait() -> None:
            with pytest.raises(FormsBusy, match="still being compiled"), turns.turn("a"):
                pass
            goes_on.set()

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: bool(turns._waiting) or goes_on.is_set())
        if not goes_on.is_set():
            with pytest.raises(FormsBusy), turns.turn("a"):
                pass
        with turns.turn("b"):
            pass
        thread.join()
    assert goes_on.is_set() and not turns._waiting
