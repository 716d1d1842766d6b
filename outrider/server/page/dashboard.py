"""The page at `/`, put together from the files of this folder: no outside assets. It holds no data: what it shows it
asks of /metrics."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.responses import HTMLResponse

SCRIPTS = ("charts.js", "markdown.js", "chat.js")


def dashboard() -> HTMLResponse:
    """Browsers run the page's own script and no other, and talk to this server alone."""
    folder = files("outrider.server.page")
    script = "\n" + "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    text = folder.joinpath("page.html").read_text(encoding="utf-8").replace("<script></script>",
                                                                            f"<script>{script}</script>")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
              "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
    return HTMLResponse(text, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})
