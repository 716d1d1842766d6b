"""Reads lines that a person types: with editing and history on a terminal, and with several pasted lines as one
text."""

from __future__ import annotations

import atexit
import select
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from outrider.core.status_line import is_terminal
from outrider.models.sources.smollm2 import cache_folder

HISTORY_LINES = 1000
LONG_PASTE = 1000  # characters
PASTE_SECONDS = 0.02  # a line that follows another sooner than this was pasted with it


class LineInput:
    """Reads from a terminal, with readline if Python has it. With readline a line may have any length; without it the
    terminal cuts lines at 4,096 bytes."""

    def __init__(self, prompt: str) -> None:
        self.on_terminal = is_terminal(sys.stdin)
        self._prompt = prompt if self.on_terminal else ""
        if self.on_terminal:
            _start_readline(cache_folder() / "chat_history")
            _hide_control_characters()

    def read(self) -> str:
        """Read the next text. Raises EOFError at the end of input, KeyboardInterrupt for Ctrl-C."""
        lines = [input(self._prompt)]
        while self.on_terminal and select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            try:
                lines.append(input())
            except EOFError:
                break
        text = "\n".join(lines)
        if self.on_terminal and len(text) > LONG_PASTE:
            self._shorten(text)
        return text

    def _shorten(self, text: str) -> None:
        """Replace a long text on the terminal by one line, as far as the text is still on the screen."""
        columns, rows = shutil.get_terminal_size()
        lines = text.split("\n")
        shown = sum(1 + len(line) // columns for line in [self._prompt + lines[0], *lines[1:]])
        count = f"{len(text):,} characters" + (f" in {len(lines):,} lines" if len(lines) > 1 else "")
        print(f"\x1b[{min(shown, rows - 1)}A\r\x1b[J{self._prompt}({count})")


def _hide_control_characters() -> None:
    """Make the terminal not show ^C when Ctrl-C stops an answer. Its settings are restored at the end of the
    process."""
    try:
        import termios
    except ImportError:  # not on this system
        return
    with suppress(termios.error):
        before = termios.tcgetattr(sys.stdin)
        now = [*before]
        now[3] &= ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin, termios.TCSANOW, now)
        atexit.register(termios.tcsetattr, sys.stdin, termios.TCSANOW, before)


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
