"""Log each environment variable of vLLM that is set but has no effect here. No torch."""

from __future__ import annotations

import logging
import os

log = logging.getLogger("outrider")

# What to use instead of a variable.
VARIABLES = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "use hf_overrides={'max_position_embeddings': ...}",
    "VLLM_ATTENTION_BACKEND": "use attention_backend",
    "VLLM_BATCH_INVARIANT": "use exact=True",
    "VLLM_CACHE_ROOT": "use download_dir for files of the hub",
    "VLLM_LOGGING_LEVEL": "use logging.getLogger('outrider').setLevel",
}
_named: set[str] = set()  # variables that the log has named


def explain_variables() -> None:
    """Log one line for each variable that is set and would change something in vLLM."""
    for name, instead in VARIABLES.items():
        if os.environ.get(name, "0") not in ("", "0") and name not in _named:
            _named.add(name)
            log.warning("the environment variable %s has no effect: %s", name, instead)
