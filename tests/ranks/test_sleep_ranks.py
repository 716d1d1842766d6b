"""Memory that other ranks know the address of stays where it is while a rank sleeps."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM
from outrider.config import EngineConfig
from outrider.engine.assembly import engine_around
from outrider.runner.worker import Worker
from tests.engine.harness import CONFIGS, random_model
from tests.engine.test_sleep import SETTINGS, generated, let_memory_move


class BufferedRanks:
    """The first of two equal ranks, with a buffer as the group of GPUs has it."""

    rank, count = 0, 2

    def __init__(self) -> None:
        self.buffer = torch.ones(1 << 12, dtype=torch.float64)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part * self.buffer[0]

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat((part, part - 1), dim)


def test_sleep_leaves_the_buffers_of_a_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    let_memory_move(monkeypatch)
    group = BufferedRanks()
    model = random_model(CONFIGS["llama"], torch.float64, 1, group)
    config = EngineConfig("tiny", **SETTINGS | {"dtype": "float64"})
    llm = LLM.around(engine_around(config, Worker(config, model)))
    expected, place = generated(llm), group.buffer.data_ptr()
    weights = [slot.target.untyped_storage() for slot in model.weights().values()]
    llm.sleep(level=1)
    assert not any(storage.nbytes() for storage in weights)
    assert group.buffer.untyped_storage().nbytes() == 8 << 12
    llm.wake_up()
    assert generated(llm) == expected and group.buffer.data_ptr() == place
    llm.close()
