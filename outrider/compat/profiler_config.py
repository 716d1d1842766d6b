"""ProfilerConfig: the folder in which vLLM's engines write profiles; here the setting `profiler_dir`. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "profiler": (None, "torch"), "delay_iterations": (None, 0), "max_iterations": (None, 0),
    "torch_profiler_with_stack": (None, False), "torch_profiler_record_shapes": (None, False),
    "torch_profiler_with_memory": (None, False), "torch_profiler_with_flops": (None, False),
    "torch_profiler_use_gzip": (None, True), "ignore_frontend": (None, False, True),
}


@dataclass(frozen=True)
class ProfilerConfig:
    profiler: str | None = None
    torch_profiler_dir: str | None = None
    delay_iterations: int = 0
    max_iterations: int = 0


def profiler_dir(given: Any) -> str | None:
    """Return the folder that a profiler_config names. Its other settings are refused by name."""
    asked = asdict(given) if isinstance(given, ProfilerConfig) else given
    if not isinstance(asked, dict):
        raise ValueError("profiler_config must be a dict or a ProfilerConfig, as {'torch_profiler_dir': 'profiles'}")
    for name, value in asked.items():
        if name != "torch_profiler_dir" and value not in NEUTRAL.get(name, (None,)):
            raise ValueError(f"profiler_config: {name}={value!r} is not supported: start_profile and stop_profile "
                             "record everything between them with torch's profiler")
    return asked.get("torch_profiler_dir")
