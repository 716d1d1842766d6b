"""Loads torch's shared libraries in the background before torch is imported. This file does not import torch."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path


def load_torch_libraries_ahead() -> None:
    """Load torch's largest library in a separate thread. Linking it takes 0.3 s, in which other modules can be
    imported.

    Only for a torch that is built for CPUs: one for CUDA finds its libraries in several places, by code that runs when
    it is imported. If this fails, the import of torch loads the library itself and reports the error."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        library = Path(folder) / "lib" / "libtorch_cpu.so"
        if library.exists() and not library.with_name("libtorch_cuda.so").exists():
            # The C function, not ctypes.CDLL, which does not let other threads run while it waits.
            arguments = (os.fsencode(library), os.RTLD_NOW)
            # No daemon: a process that ends while the library sets itself up would abort, so its end waits.
            threading.Thread(target=ctypes.CDLL(None).dlopen, args=arguments).start()
