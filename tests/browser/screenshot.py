"""Takes docs/dashboard.png: SmolLM2 with n-gram drafts, some load, one chat.

    python -m tests.browser.screenshot [docs/dashboard.png]
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from tests.browser.webdriver import browser

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "auto": false}'
QUESTION = "Write the numbers from 1 to 20, separated by commas. Then write them once more."
TEXTS = ["List the months of the year, twice.", "Count from 1 to 50.", "Say hello five times.", "Name ten animals."]


def main(path: Path) -> None:
    command = [sys.executable, "-m", "outrider.cli", "serve", "smollm2", "--port", "0", "--speculative-config", DRAFTS]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r" at (http://\S+)", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        while httpx.get(f"{url}/health").status_code != 200:
            time.sleep(0.5)
        with browser(1400, 980) as page:
            page.open(url)
            stop = threading.Event()
            loads = [threading.Thread(target=keep_busy, args=(url, stop, i)) for i in range(4)]
            for thread in loads:
                thread.start()
            time.sleep(75)
            page.say(QUESTION)
            page.wait_for("return document.querySelector('.note') !== null", 240)
            time.sleep(2)
            page.screenshot(path)
            stop.set()
            for thread in loads:
                thread.join()
    finally:
        server.terminate()
        server.wait(60)


def keep_busy(url: str, stop: threading.Event, index: int) -> None:
    """Waves of requests, so that the charts have something to show."""
    while not stop.is_set():
        body = {"messages": [{"role": "user", "content": TEXTS[index]}], "max_tokens": 40 + 20 * index}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        time.sleep(index * 1.5)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/dashboard.png"))
