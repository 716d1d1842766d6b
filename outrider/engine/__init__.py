"""The engine: the loop of steps, the life of a request, and the conversion of text to tokens and back.

**A step fails** (any exception while it is queued, runs or is read). Batches carry a *generation*. In the worker
(`runner/generations.py`) a failed step cancels all later steps of its generation: they raise `StepCancelled` and change
nothing. The host waits for them, and the scheduler recovers (`Scheduler.recover`): every request that has a row gives
it up and is computed again from its settled tokens, in a new generation. Before the first batch of that generation the
device forgets all rows (`DeviceStep.reset`). This forgets rows, drafts, accepted drafts that are not yet folded into
recurrent states, unfinished checkpoints, and every page that only unsettled steps wrote. Tokens that were sent out
stay, and so do pages and checkpoints that settled results have published. A row's page table is null until the last
part of its admission, so a row whose admission failed half-way reaches no pages.

**The request at fault is found** (`sched/faults.py`). The requests of a failed step are computed again together, once.
If that fails too, they are tried in halves, then in halves of halves, while all others wait; a request that fails twice
alone ends with the error, and the others go on. A step that was only too large succeeds in halves. A request is no
longer suspected once it is computed further than the failed step would have brought it.

**A drafter fails** (it raises, or returns something else than drafts): no step fails, and no request ends. The drafter
loses its drafts of that step, and after 3 faults it is switched off (`core/drafter_faults.py`; drafters.md lists the
kinds of faults). Wrong values, which the device finds, travel to the host in two columns of the step's counts;
`StepResult.drafting` brings all faults to `EngineStats`. Once every drafter is off, `StepDrafts.observe` replaces the
choice of counts by `FixedDrafts(0)` (`speculation/draft_counts.py`). Captured steps may still run the drafter;
`store_drafts` then reads on the device that the drafter is off, and drops its drafts. Only a drafter that writes to the
tensors of row state fails the step: every request is then admitted anew, as after any failed step.

**A device is lost** (it answers no synchronize: `_explained` in `runner/graphs/cuda_runner.py`; or the worker's process
ended, or one of several ranks hangs or failed alone: `WorkerProcess._end` in `engine/worker_process.py`): all requests
are answered with `WorkerDied`, or `EngineError` in `AsyncLLM`, and so are later calls to that engine. An engine never
gets a new worker. The server starts a new engine instead: `EngineHost._watch` (`server/engine_host.py`) checks every
second whether the engine and its worker live, and has a worker whose steps have stalled for twice `stall_timeout`
killed (`kill_worker`, `commands/serve_engine.py`). `_restart` loads the model again, at most `max_restarts` times in
ten minutes; then the server has failed. Requests meanwhile get 503.

**A request is refused** with nothing changed: all prompts of a call are checked before the first request is queued
(`Engine.add`).

**Ctrl-C** may land on any line. `RequestLoop` sets a mark before it changes the engine and clears it afterwards. A
caller that finds the mark set knows that an earlier call was interrupted, and resets the engine (`Engine.reset`: a new
scheduler, an empty cache, the next generation); requests of other callers go on from the outputs that they have. The
reset may be interrupted too, and begins again. Callers in several threads take turns.

**A process is forked**: the worker and all threads stay in the parent. Calls of the engine in the child raise
`EngineError`. An engine that the child closes stays open in the parent.

**Activations are not finite**: the request ends, and what its last step computed is not published. A bad token must
fail every token that may see it, and no other token, even if the bad token was a rejected draft:

- Attention: the cache write gives the bad token keys of NaN and values of 0 (`contain_non_finite` in
  `kernels/reference.py`); the codec of another cache type has a mark of its own. The Triton kernels that write keys
  and values do the same, head by head (`kernels/gpu/pages/cache_write.py`).
- Recurrent layers: a scan gives NaN to the bad token, to the tokens after it and to the state, and to no token before
  it, as computing token by token would (`kernels/recurrent.py`). The Triton kernels compute a chunk that has a bad
  token again, token by token."""

from pathlib import Path

# Modules of vLLM's package of this name are found behind those of this folder; see compat/__init__.py.
__path__.append(str(Path(__file__).parents[1] / "compat" / "modules" / "engine"))
