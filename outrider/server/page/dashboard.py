"""The page at `/`. It is built from the files of this folder and loads nothing from elsewhere. It contains no data: its
script reads /metrics."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.responses import HTMLResponse

SCRIPTS = ("charts.js", "markdown.js", "chat.js")


def dashboard() -> HTMLResponse:
    """The page as a response. Its headers allow browsers to run only the page's own script and to connect only to this
    server."""
    folder = files("outrider.server.page")
    script = "\n" + "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    text = folder.joinpath("page.html").read_text(encoding="utf-8").replace("<script></script>",
                                                                            f"<script>{script}</script>")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
              "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
    return HTMLResponse(text, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})
