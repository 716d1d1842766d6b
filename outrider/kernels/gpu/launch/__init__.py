"""Launches and compiles kernels.

Begin with `triton_kernel.py`: `@kernel` declares a kernel that the host launches. `precompile.py` compiles kernels
before a request needs them, from launches that were collected instead of carried out (`collected.py`).
`asked_driver.py` answers the compiler's questions about the device in forks and threads."""
