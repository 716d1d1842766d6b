"""`outrider serve --node-rank 1`: holds ranks for the engine of node 0, and serves no requests itself."""

from __future__ import annotations

import signal

from outrider.commands.serve_engine import tell
from outrider.config import EngineConfig
from outrider.core.deep_thread import end_process
from outrider.engine.hosts.host_agent import host_ranks


def serve_node(engine: EngineConfig) -> int:
    """Hold ranks until a signal comes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        host_ranks(engine, tell)
    except KeyboardInterrupt:
        tell("stopped")
    end_process(0)
    return 0
