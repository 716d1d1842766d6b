"""Lines that a person types: editing and history on a terminal, and a paste of several lines as one text."""

from __future__ import annotations

import atexit
import select
import sys
from contextlib import suppress
from pathlib import Path

from outrider.core.status_line import is_terminal
from outrider.models.sources.smollm2 import cache_folder

HISTORY_LINES = 1000
PASTE_SECONDS = 0.02  # a line that follows another sooner than this was pasted with it


class LineInput:
    """Reads from a terminal with readline where Python has it. There a line may be of any length; without, the
    terminal itself cuts it at 4,096 bytes."""

    def __init__(self, prompt: str) -> None:
        self.on_terminal = is_terminal(sys.stdin)
        self._prompt = prompt if self.on_terminal else ""
        if self.on_terminal:
            _start_readline(cache_folder() / "chat_history")

    def read(self) -> str:
        """The next text. Raises EOFError at the end of input, KeyboardInterrupt for Ctrl-C."""
        lines = [input(self._prompt)]
        while self.on_terminal and select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            try:
                lines.append(input())
            except EOFError:
                break
        return "\n".join(lines)


def _start_readline(history: Path) -> None:
    try:
        import readline
    except ImportError:  # Python was built without it: plain lines work
        return
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):  # there is none yet, or it cannot be read
        readline.read_history_file(history)

    def save() -> None:
        with suppress(OSError):  # a folder that cannot be written costs the history and nothing else
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)

    atexit.register(save)
