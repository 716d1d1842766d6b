"""The page at `/`: one file without outside assets. It holds no data: what it shows it asks of /metrics."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse


def dashboard() -> HTMLResponse:
    """Browsers run the page's own script and no other, and talk to this server alone."""
    text = files("outrider.server").joinpath("dashboard.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = (f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
              "base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
    return HTMLResponse(text, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})
