"""Adapters on ranks: factors are sharded as their weights are, and the text is that of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.adapters import LoRARequest
from outrider.config import EngineConfig
from outrider.engine.start import start_engine
from outrider.features.adapters.commands import AdapterRead, PollAdapter
from outrider.formats import RankGroup
from outrider.llm import LLM
from tests.adapters.folders import write_adapter, write_adapter_of_all
from tests.engine.harness import CONFIGS, Rig, greedy, prompt_of, random_model, save_folder
from tests.models import oracle
from tests.ranks.families import make_model
from tests.ranks.pool import RankPool

LONG = ("gemma3", "qwen2", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "deepseek_v32", "nemotron_h_latent", "bamba")
SETTINGS: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "lora_memory_bytes": 16 << 20}
PROMPT = oracle.tokens_of(seed=3, count=14).tolist()


def run_adapters(group: RankGroup | None, family: str, folders: list[Path]) -> list[list[int]]:
    """Texts of the model and of each adapter, all in one batch."""
    asked = [None, *(LoRARequest(path.name, 1, str(path)) for path in folders)]
    with Rig(make_model(family, group), **SETTINGS) as rig:
        outputs = LLM.around(rig.engine).generate([PROMPT] * len(asked), greedy(10), lora_request=asked, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe",
                                    *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_text_is_that_of_one_rank(ranks: RankPool, family: str, tmp_path: Path) -> None:
    """Adapters of all that can be adapted: heads, experts and the vocabulary are sharded among ranks."""
    model = make_model(family, None)
    folders = [write_adapter_of_all(tmp_path / str(seed), model, seed, rank) for seed, rank in ((1, 4), (2, 7))]
    wanted = run_adapters(None, family, folders)
    assert len(set(map(tuple, wanted))) == 3, "the adapters change nothing"
    assert ranks.run(2, run_adapters, family, folders) == [wanted] * 2


def test_a_broken_adapter_is_refused_when_all_ranks_have_read_it() -> None:
    """Ranks read at their own pace: a failure of the first to end must not be taken for one of that rank alone."""
    poll, good, bad = PollAdapter(1), AdapterRead(5), AdapterRead(error="tensor x holds NaN")
    assert poll.combine([bad, None]) is None and poll.combine([None, good]) is None
    assert poll.combine([good, AdapterRead(7)]) == AdapterRead(7)
    assert poll.combine([bad, bad]) == bad
    assert poll.combine([good, bad]) == AdapterRead(error="rank 1: tensor x holds NaN")


@pytest.mark.long
def test_an_engine_of_two_ranks_loads_and_refuses_adapters(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    model = save_folder(tmp_path / "model", config, seed=7)
    whole = random_model(config, torch.float64, 7)
    own = write_adapter(tmp_path / "own", whole, 1)
    broken = write_adapter(tmp_path / "broken", whole, 1, scale=float("nan"))
    texts = []
    for count in (1, 2):
        settings = {"dtype": "float64", "device": "cpu", "max_model_len": 96, "max_num_seqs": 3, "num_pages": 32}
        engine = EngineConfig(str(model), skip_tokenizer_init=True, tensor_parallel_size=count, **SETTINGS | settings)
        with LLM.around(start_engine(engine)) as llm:
            for _ in range(10):  # whichever rank has read it first
                with pytest.raises(ValueError, match="NaN or Inf"):
                    llm.generate([prompt_of(3, 20)], greedy(4), lora_request=LoRARequest("broken", 1, str(broken)),
                                 use_tqdm=False)
            asked = [LoRARequest("own", 1, str(own)), None]
            outputs = llm.generate([prompt_of(3, 20)] * 2, greedy(8), lora_request=asked, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
