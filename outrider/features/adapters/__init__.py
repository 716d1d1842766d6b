"""Adapters: low-rank changes of a model's products (LoRA), which requests name. Several may run in one batch.

| file | what it is |
|---|---|
| `loads.py` | the engine's keeper of requests: names, numbers of loads, what may be dropped |
| `slots.py` | the scheduler's resource: which adapters are on the device, and where |
| `placements.py` | the batch's part: adapters to be copied before a step |
| `store.py` | the step's part: reads folders, copies adapters to their places, gives token rows their deltas |
| `commands.py` | orders to a worker: read, poll, drop |
| `on_device.py`, `in_engine.py` | the feature's halves, which make the above |

Behind the store: `peft_folder.py` reads files, `target.py`, `experts_target.py` and `targets.py` fit them to the model,
`host_adapter.py` lays them out, `arena.py` is their device memory and `step_adapters.py` the deltas of one step. What
callers name is in `outrider/lora_request.py`, how fronts load it in `outrider/adapter_loading.py`.
"""
