"""The format of log lines: text for people, or one JSON object per line for log collectors."""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from outrider.core.foreign_text import log_lines

REQUESTS = logging.getLogger("outrider.requests")  # one line for every request that ended
REQUEST_ID: ContextVar[str | None] = ContextVar("request id", default=None)  # X-Request-Id of the request being served
FIELDS = "fields"  # the attribute of a record that holds further values
PLAIN = re.compile(r'[!#-~]+')  # a text of a field that needs no quotes


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                                "level": record.levelname.lower(), "logger": record.name,
                                "message": record.getMessage()}
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        more = "".join(f" {name}={_field(value)}" for name, value in getattr(record, FIELDS, {}).items())
        text = f"outrider: {record.levelname.lower()}: {record.getMessage()}{more}"
        return log_lines(f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text)


def _field(value: object) -> object:
    """Format a value for a text log line; a string that could be read as several fields is quoted."""
    return json.dumps(value) if isinstance(value, str) and not PLAIN.fullmatch(value) else value


def set_up_logs(log_format: str, *, logs_requests: bool) -> None:
    """Send the server's own lines and uvicorn's to stderr in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in ("outrider", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    REQUESTS.setLevel(logging.INFO if logs_requests else logging.WARNING)


def log_request(**fields: Any) -> None:
    if REQUESTS.isEnabledFor(logging.INFO):
        REQUESTS.info("request ended", extra={FIELDS: fields})
