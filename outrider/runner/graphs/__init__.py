"""Captured steps: which sizes of step are captured, when and how, and how steps are warmed up and measured.

On CUDA a step is one graph per padded size. `runner/graphs/sizes.py` declares the sizes. Only the numbers of token rows
that requests with different numbers of drafts share are in `core/decode_sizes.py`. `runner/graphs/keys.py` makes the
`GraphKey` of a batch, `runner/graphs/chooser.py` chooses the graph that runs, and `runner/graphs/captures.py` captures.
There are few keys, because most properties of a step are data in the graph: rows, numbers of drafts, context lengths,
sampling parameters, checkpoints. The sampler has one of two forms (`SamplerForm`), a draw or all parameters. Token
counts for penalties take memory when a request first asks, so kernels read their address from the device
(`CountTable`), and older graphs serve them too.

What is captured when:

- start-up: decode steps for 1, 2, 4, 8, ... requests, without drafts also 48, 96, ..., and for the most there may be,
  up to 256; every second power of two also with all parameters
- start-up, if a drafter has layers and the scheduler chooses: every size with every number of drafts; the costs of
  proposals are measured on these graphs
- start-up: steps with prompts: the largest, and a few wide ones in both forms (`PROMPTS_AT_START`)
- the engine is idle: one graph at a time (`CaptureChooser.choose_idle`, called by `CudaRunner.idle`): first the size
  whose steps have lost the most time, then the usual decode sizes that no batch has needed yet, last some sizes whose
  token rows requests with different numbers of drafts share
- requests run and the loss of a size is large enough (`Losses.is_due`): that size, behind the step that is queued
  (`Replay.behind`); no other capture follows for a while
- a batch needs a decode step that no graph covers: that size at once (`Replay.before`), since more steps of the size
  will follow

All captures share memory that was reserved for the largest one (`StepGraphs.reserve`), so they can be made in any
order. A size without a graph of its own runs on the cheapest captured graph that covers it. If the step has prompts,
and waiting for the host's launches costs less time than the padding, it runs without a graph (`Uncaptured.NEW_SIZE`).
Either way the step loses time, which `runner/graphs/losses.py` adds up by size. A capture is due when its size has lost
as much time as the capture takes; half of that is enough for a decode size. If a capture takes over 20 ms, the size
must have lost more, in proportion.

How a step runs:

How a batch runs is chosen once, before it runs, from the host's data alone: `CaptureChooser.choose` returns a
`StepChoice`, which `CudaRunner._carry_out` (`runner/graphs/cuda_runner.py`) carries out without a decision of its own.

| choice | the step |
|---|---|
| `Replay` | replays the graph of a key; it may order a capture before the step or behind it |
| `Launch` | has the key's padded size, and is launched by the host |
| `RunEagerly` | has exactly the batch's size, and is launched by the host |

A choice is plain data that can be pickled, so one of several ranks can choose and send the choice with the batch. The
chooser reads the clock and knows what is captured. It also learns how long each capture took, or that there was no
memory for it (`StepGraphs.carry_out`). A rank without memory for a graph launches the same key, so all ranks run the
same sizes.

A large step with prompts that a graph would pad by 128 tokens or more is launched at its own size, if the device takes
at least twice as long for it as the host's launches (`LossRates.own_size`). Graphs with prompts do not record which
requests are prompts: kernels read that from the batch.

Every reason for which a step runs uncaptured is a member of `core.Uncaptured`; it travels in the `StepResult`,
`EngineStats` counts it, and `outrider bench -v` shows it.

- the runner, for all steps: no graphs here, `can_capture` (`mixers/cached.py`) says no, or a feature edits
  logits
- `GraphKeys.key_for`, for a batch: folds, row deltas that no captured step computes, inputs of a prompt beside
  its token ids, several checkpoints of one request, hidden states, log-probabilities of a prompt or too many of them,
  lists that found no place on the device, prompts whose lengths the host must know, parameters that no kernel samples,
  more requests or tokens than any graph
- `LossRates.own_size`: large steps with prompts
- `CaptureChooser`: new sizes, no memory, or 256 later captures already

A graph contains `DeviceStep.forward_half` and `finish_half`, run with `GraphKeys.shape` and `GraphKeys.plan` of its
key. They may use no other data of the host. To capture further kinds of step, change `key_for`, `GraphKey` with its
`covers`, `plan` and `shape` together (all in `runner/graphs/keys.py`), and `kernels/packet.py` for new integers. Most
steps are captured whole; a batch whose `form` is `StepForm.SPLIT` replays one graph for each half, and the host has its
turn between them (`DeviceStep.host_turn`).

Only the rows that make logits:

Only a few of the many tokens of a step with prompts make logits. The last layer that writes a cache, and the layers
behind it, are therefore computed for those few tokens only. This holds for steps with prompts that have a
`CapturedShape`, whether they are replayed or launched, unless the drafter reads all hidden states
(`Drafter.reads_hidden`, `drafters/base.py`).

- `DeviceStep._needs_only_logit_rows` (`runner/step.py`) decides whether.
- `_cut` (`models/base.py`) decides from which layer on: later if a drafter reads a later layer, only the very last if a
  layer behind cannot attend for some rows.
- Keys and values of all tokens are written; then the layers (`for_rows`) attend over a second view, `logit_view`
  (`runner/batch.py`), through `WantedRows` (`mixers/cached.py`). Backends that can do this set `serves_rows`.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.runner.graphs.costs import measure_costs
    from outrider.runner.graphs.cuda_runner import CudaRunner
    from outrider.runner.graphs.mixed_costs import measure_mixed_costs
    from outrider.runner.graphs.warm_up import measure_step_memory
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["CudaRunner", "measure_costs", "measure_mixed_costs", "measure_step_memory"]
