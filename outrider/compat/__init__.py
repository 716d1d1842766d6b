"""The names that scripts written for vLLM use: its settings (`settings.py`), and its modules at their places.

`modules/` lies on the search path of the package itself, behind the package's own folder (see `outrider/__init__.py`):
`from outrider.sampling_params import SamplingParams` finds `compat/modules/sampling_params.py`. A module of vLLM that
is not here is in the table of `missing_modules.py`, which the error of its import quotes. Nothing else in the package
imports these modules.
"""

from outrider.compat.alias import install_as_vllm

__all__ = ["install_as_vllm"]
