"""Tells whether this process is an engine's child that is importing the caller's script (`spawned.py`). No torch."""

from __future__ import annotations

import os

UNGUARDED = 86  # exit code of a process that was about to make an engine while it imported the script
UNGUARDED_ADVICE = ("each process of the engine imports the script, and the script makes an engine while it is "
                    "imported: put what it does into a function, and call that below `if __name__ == '__main__':`")


class ScriptImport:
    """Whether this process is importing the caller's script. The flag is global to the process, because it is read
    before an engine exists."""

    is_running = False


def end_if_importing_script() -> None:
    """End this child process if the script that it imports is about to make another engine. There is no traceback,
    because the parent's error says what to do."""
    if ScriptImport.is_running:
        os._exit(UNGUARDED)
