"""A headless Chromium, driven through chromedriver's own HTTP interface: no package is needed for it."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

INSTALL = "there is no chromium and chromedriver here: apt-get install -y chromium chromium-driver"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]


class Browser:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The value that the script returns in the page."""
        return self._post("/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def wait_for(self, script: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"waited in vain for {script}"
            time.sleep(0.1)

    def say(self, text: str) -> None:
        """Types into the chat box and sends."""
        self.run("const box = document.getElementById('say'); box.value = arguments[0];"
                 "document.querySelector('form').requestSubmit()", text)

    def resize(self, width: int, height: int) -> None:
        """Gives the page a size; windows cannot be as narrow as telephones."""
        self._post("/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}})

    def screenshot(self, path: Path) -> None:
        answer = self._http.get("/screenshot").raise_for_status().json()
        path.write_bytes(base64.b64decode(answer["value"]))

    def problems(self) -> list[str]:
        """Errors that the page has logged, but for answers with an error status."""
        entries = self._post("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE" and entry["source"] != "network"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer and "stacktrace" in answer), answer
        return answer


@contextmanager
def browser(width: int = 1400, height: int = 900) -> Iterator[Browser]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise RuntimeError(INSTALL)
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := re.search(r"on port (\d+)\.", line)))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}",
                                                    f"--window-size={width},{height}"]}
            asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options,
                                                      "goog:loggingPrefs": {"browser": "ALL"}}}}
            address = f"http://127.0.0.1:{found[1]}/session"
            answer = httpx.post(address, json=asked, timeout=120).json()["value"]
            assert "sessionId" in answer, answer
            with httpx.Client(base_url=f"{address}/{answer['sessionId']}", timeout=120) as http:
                try:
                    yield Browser(http)
                finally:
                    http.delete("")
    finally:
        process.terminate()
        process.wait()
