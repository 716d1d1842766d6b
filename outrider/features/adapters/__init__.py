"""Adapters: low-rank changes of a model's products (LoRA), which requests name. Several may run in one batch.

| file | what it is |
|---|---|
| `loads.py` | the engine's registry (`AdapterRegistry`): names, load numbers, loads that requests use |
| `slots.py` | the scheduler's resource: which adapters are on the device, and where |
| `placements.py` | the batch's part: adapters to be copied before a step |
| `store.py` | the step's part: reads folders, copies adapters to their places, gives token rows their deltas |
| `commands.py` | orders to a worker: read, poll, drop |
| `on_device.py`, `in_engine.py` | the feature's parts in the worker and in the engine, which make the above |

The store uses further files: `peft_folder.py` reads the folder of an adapter, `target.py`, `experts_target.py` and
`targets.py` fit them to the model, `host_adapter.py` lays them out, `arena.py` is their device memory and
`step_adapters.py` the deltas of one step. Callers name an adapter with the classes of `outrider/lora_request.py`;
fronts load it with `outrider/adapter_loading.py`.

The way of an adapter, from a route to the device and back:

1. `ServedAdapters.find` (`server/`) takes the body's model for the adapter's name. `AsyncLLM.check`, or `LLM._checked`,
   asks `AdapterRegistry.begin` for a load. It orders `BeginAdapter` of the worker, where `AdapterStore.read` reads the
   folder on a thread beside the steps; the front asks `is_ready` until it has been read.
2. The request gets its part, `LoadedAdapter`, which is also a key of its pages. When the engine adds the request,
   `AdapterRegistry.renew` gives it the newest load and `enter` counts it.
3. `Scheduler._admit` takes a slot for it (`AdapterSlots.take`). If the adapter is not on the device, the batch has an
   `AdapterPlacements` part.
4. Before the step, `AdapterStore.begin` copies the adapter and `admit` notes the slot of the row. `of_step` makes the
   `StepAdapters` of the token rows, which layers find in `StepContext.deltas`.
5. When the row ends, it gives the slot back (`AdapterSlots.give`). When the request ends, it leaves the load
   (`AdapterRegistry.leave`).
   The adapter stays on the device until another one needs its place."""
