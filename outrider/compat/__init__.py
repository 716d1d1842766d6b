"""The names that scripts written for vLLM use: its settings (`settings.py`), and its modules at their places.

`modules/` is on the search path of the package itself, behind the package's own folder (see `outrider/__init__.py`):
`from outrider.sampling_params import SamplingParams` finds `compat/modules/sampling_params.py`. For vLLM's other
modules `missing_modules.py` has the advice that the import's error quotes. Nothing else in the package imports these
modules.
"""

from outrider.compat.alias import install_as_vllm

__all__ = ["install_as_vllm"]
