"""Adapters: low-rank changes of a model's products (LoRA), which requests name. Several may run in one batch.

`engine/adapter_registry.py` is the engine's side: names, load numbers and what may be dropped. `store.py` is the
worker's: it reads folders (`peft_folder.py`), lays them out for its model (`target.py`, `experts_target.py` and
`targets.py`, `host_adapter.py`), copies them into one planned piece of device memory (`arena.py`),
and gives each step the adapters of its token rows (`step_adapters.py`).
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.adapters.store import AdapterStore, with_adapters
    from outrider.core.lora_request import LoRARequest
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["AdapterStore", "LoRARequest", "with_adapters"]
