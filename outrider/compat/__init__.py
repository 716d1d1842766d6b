"""The names that scripts written for vLLM use: its settings (`settings.py`), and its modules at their places.

`modules/` is on the search path of the package `outrider`, after the package's folder (see `outrider/__init__.py`):
`from outrider.sampling_params import SamplingParams` finds `compat/modules/sampling_params.py`. If a script imports
another module of vLLM, the import error quotes advice from `missing_modules.py`. Nothing else in the package imports
these modules.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.compat.alias import install_as_vllm
    from outrider.compat.metrics import Metric, engine_metrics
    from outrider.compat.misplaced_arguments import NOT_SERVED, refuse_misplaced, refuse_sampling_field
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["NOT_SERVED", "Metric", "engine_metrics", "install_as_vllm", "refuse_misplaced", "refuse_sampling_field"]
