"""Replica: the front's record of one engine's server: its state and load. It does not start or watch the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class ReplicaState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    NOT_HEALTHY = "not healthy"  # its engine fails and starts again, or its steps have stopped
    OLD_WEIGHTS = "at older weights than others"  # it serves after the next update of weights
    GONE = "gone"  # its process has ended; it is started again, unless the server ends


@dataclass
class Replica:
    number: int
    socket_path: str
    state: ReplicaState = ReplicaState.STARTING
    num_live: int = 0  # requests that the front has passed to it and that have not ended
    num_restarts: int = 0
    name: str = field(init=False)  # what the router calls it

    def __post_init__(self) -> None:
        self.name = str(self.number)
