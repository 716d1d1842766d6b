"""Adapters on every family against PEFT in float64: greedy text of several adapters and none in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.adapters import LoRARequest
from outrider.core.params import SamplingParams
from outrider.layers import Linear, RowDeltas, StepContext
from outrider.layers.context import LinearLayer, NothingAttends
from outrider.llm import LLM
from tests.adapters.folders import make_adapter, peft_greedy
from tests.models import gguf_files, oracle

PROMPT = oracle.tokens_of(seed=3, count=12).tolist()
COUNT = 12
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "device": "cpu", "enable_lora": True, "max_num_seqs": 4, "num_pages": 64, "max_model_len": 128,
    "skip_tokenizer_init": True, "lora_memory_bytes": 16 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
JOINT = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]}
# PEFT does not take the out_proj of Mamba layers.
MAMBA = ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc1_latent_proj"]
FIRST: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma3": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": JOINT, "qwen3_next": JOINT, "qwen3_5": {},
    "qwen3_5_moe": JOINT, "deepseek_v3": JOINT, "deepseek_v32": JOINT, "glm_moe_dsa": JOINT, "hy_v4": JOINT,
    "mixtral": JOINT, "minimax_m2": JOINT, "kimi_linear": JOINT, "bailing_hybrid": JOINT, "phi3": {},
    "bamba": {"target_modules": MAMBA},
    "nemotron_h": {"target_modules": MAMBA[:-1], "target_parameters": ["experts.up_proj", "experts.down_proj"]},
    "nemotron_h_latent": {"target_modules": MAMBA, "target_parameters": ["experts.up_proj", "experts.down_proj"]},
}
QUICK = ("llama", "gemma3", "deepseek_v3", "nemotron_h_latent", "qwen3_next")


def tokens_of(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False)
    assert all(output.outputs[0].error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.long) for family in FIRST])
def test_text_is_that_of_peft_for_each_adapter_of_a_batch(family: str, tmp_path: Path) -> None:
    """The second adapter changes embeddings and head, and some layers in ranks of their own."""
    if family in oracle.KDA_FAMILIES:
        pytest.importorskip("transformers", minversion=oracle.KDA_SINCE)
    folder = oracle.make_folder(family, tmp_path / "model")
    first = make_adapter(folder, tmp_path / "first", 1, **FIRST[family])
    table = "embeddings" if "nemotron" in family else "embed_tokens"
    second = make_adapter(folder, tmp_path / "second", 2, r=8, use_rslora=True, rank_pattern={"down_proj": 3},
                          alpha_pattern={"o_proj": 16}, layers_to_transform=None,
                          target_modules=["q_proj", "o_proj", "down_proj", table, "lm_head"])
    folders = None, first, second
    wanted = [peft_greedy(folder, each, PROMPT, COUNT) for each in folders]
    assert len(set(map(tuple, wanted))) == 3, "the adapters change nothing"
    asked = [None if path is None else LoRARequest(path.name, 1, str(path)) for path in folders]
    with LLM(str(folder), **SETTINGS) as llm:
        assert tokens_of(llm, [PROMPT] * 3, asked) == wanted
        assert tokens_of(llm, [PROMPT] * 3, asked[::-1]) == wanted[::-1], "pages of the first run are found"


@pytest.mark.long
def test_text_of_a_language_model_within_another_is_that_of_peft(tmp_path: Path) -> None:
    """GLM5-Next: all of its linear layers, those of KDA, of the indexer and of limited MLPs too, and experts."""
    folder = oracle.make_folder("glm5_next", tmp_path / "model")
    inside = r".*language_model\.layers\..*(_proj|_mqa|wq_b|wk)"
    paths = [make_adapter(folder, tmp_path / "first", 1, target_modules=inside, target_parameters=[
                 "language_model.layers.1.mlp.experts.gate_up_proj", "language_model.layers.1.mlp.experts.down_proj"]),
             make_adapter(folder, tmp_path / "second", 2, r=8, target_modules=["embed_tokens", "lm_head"])]
    wanted = [peft_greedy(folder, each, PROMPT, COUNT) for each in (None, *paths)]
    assert len(set(map(tuple, wanted))) == 3, "the adapters change nothing"
    asked = [None, *(LoRARequest(path.name, 1, str(path)) for path in paths)]
    with LLM(str(folder), **SETTINGS) as llm:
        assert tokens_of(llm, [PROMPT] * 3, asked) == wanted
        assert tokens_of(llm, [PROMPT] * 3, asked[::-1]) == wanted[::-1], "pages of the first run are found"


def test_a_gguf_file_of_qwen3_next_takes_adapters_on_the_joint_projections_of_its_makers(tmp_path: Path) -> None:
    """The file has the projections of gated delta layers apart; PEFT knows two joint ones, key head by key head."""
    written = gguf_files.FAMILIES["qwen3next"]
    folder = written.checkpoint(tmp_path / "hf")
    file = gguf_files.write(tmp_path / "model.gguf", folder, written)
    paths = [make_adapter(folder, tmp_path / "ba", 1, target_modules=["in_proj_ba"]),
             make_adapter(folder, tmp_path / "both", 2, target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj"],
                          rank_pattern={"in_proj_ba": 3})]
    wanted = [peft_greedy(folder, each, PROMPT, COUNT) for each in (None, *paths)]
    assert len(set(map(tuple, wanted))) == 3, "the adapters change nothing"
    asked = [None, *(LoRARequest(path.name, 1, str(path)) for path in paths)]
    with LLM(str(file), **SETTINGS) as llm:
        assert tokens_of(llm, [PROMPT] * 3, asked) == wanted


def test_a_row_has_the_same_bits_whatever_adapters_its_mates_have(tmp_path: Path) -> None:
    """Logits of a request alone and in a batch, with an adapter and without, bit for bit."""
    folder = oracle.make_folder("llama", tmp_path / "model")
    paths = [make_adapter(folder, tmp_path / str(seed), seed, r=rank) for seed, rank in ((1, 4), (2, 16))]
    one, two = (LoRARequest(path.name, 1, str(path)) for path in paths)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=20)
    prompts = [oracle.tokens_of(seed, 12).tolist() for seed in range(3)]

    def logprobs(llm: LLM, adapters: list[LoRARequest | None], count: int = 3) -> list[list[Any]]:
        done = llm.generate(prompts[:count], params, lora_request=adapters, use_tqdm=False)
        return [[[(token, own.logprob) for token, own in step.items()] for step in output.outputs[0].logprobs or ()]
                for output in done]

    settings = SETTINGS | {"exact": True, "enable_prefix_caching": False, "dtype": "float32"}
    with LLM(str(folder), **settings) as llm, LLM(str(folder), **settings | {"enable_lora": False}) as without:
        (alone,), (plain,) = logprobs(llm, [one], 1), logprobs(without, [None], 1)
        assert logprobs(llm, [one, two, None])[0] == logprobs(llm, [one, one, one])[0] == alone
        assert logprobs(llm, [None, two, one])[0] == plain != alone


def test_products_that_are_added_in_place_round_as_others_do() -> None:
    """One token row and many add to the residual stream inside the last product, others behind it."""

    class AddsThird(RowDeltas):
        def of_rows(self, token_rows: torch.Tensor) -> RowDeltas:
            return self

        def add_to(self, out: torch.Tensor, linear: LinearLayer, x: torch.Tensor, first: int) -> None:
            out += 1 / 3

    generator = torch.Generator().manual_seed(1)
    weight, x, residual = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 8), (5, 8), (5, 64)))
    context = StepContext(NothingAttends(), torch.arange(5), deltas=AddsThird())
    linear = Linear.from_weight(weight)
    wanted = residual + linear(x, context)
    linear.add_to(residual, x, context)
    assert residual.equal(wanted)


def test_the_reference_writes_no_row_without_an_adapter(tmp_path: Path) -> None:
    from outrider.adapter_loading import with_adapter
    from outrider.core import Admission, Limits, ScheduledBatch
    from outrider.core.checked_request import NO_REQUEST
    from outrider.features.adapters.on_device import with_adapters
    from outrider.features.adapters.placements import AdapterPlacement, AdapterPlacements
    from outrider.features.adapters.store import AdapterStore
    from outrider.kernels.delta_tables import NO_SLOT
    from outrider.layers import Linear, find_modules

    folder = oracle.make_folder("llama", tmp_path / "model")
    path, model = make_adapter(folder, tmp_path / "own", 1), oracle.load(folder, torch.float64)
    store = AdapterStore(model, 8, with_adapters(Limits(4, 8, 64, 0, oracle.VOCAB), model, 2, 8, None))
    store.read(7, "own", str(path))
    store._loads[7].result()
    placed = AdapterPlacements((AdapterPlacement(7, 1, 0),))
    store.begin(ScheduledBatch(0, [], [], [], [], [], [], [], parts=(placed,)))
    store.admit([Admission(row, with_adapter(NO_REQUEST, number), 0, 8) for row, number in ((1, 7), (2, None))])
    assert store.arena.slot_of_row.tolist() == [NO_SLOT, 1, NO_SLOT, NO_SLOT, NO_SLOT]
    rows = store.of_step(torch.tensor([2, 1]), torch.tensor([0, 1, 1]))
    linear = find_modules([model], Linear)[0]
    out = torch.full((3, linear.out_features), torch.nan, dtype=torch.float64)
    out[1:] = 0
    rows.add_to(out, linear, torch.ones(3, linear.in_features, dtype=torch.float64), 0)
    assert out[0].isnan().all() and (out[1:] != 0).all() and out[1].equal(out[2])
    store.close()
