"""Exact mode in engines of other makes: draft heads that read hidden states, a worker in a process, weights in the bits
of a GGUF file, other numbers of threads, processed log-probabilities. Tokens and log-probabilities are compared bit for
bit with those of each request alone, without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.structured import StructuredOutputsParams
from outrider.kernels import cpu as native
from outrider.layers.fuse import use_activation_bits
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from tests.drafters.checkpoints import make_drafter
from tests.drafters.trained import ASSETS, SPECULATIVE, trained_prompts
from tests.engine.harness import CONFIGS, Ask, Rig, byte_tokenizer, prompt_of, random_model, save_folder, tiny_model
from tests.engine.test_exact_mode import FAMILIES, PARAMS, SETTINGS, bits_of, model_of
from tests.engine.test_quantized import MIXED, QWEN3, build
from tests.engine.test_worker_process import started

pytestmark = pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")


def asks_for(prompts: Sequence[list[int]], vocab: int) -> list[Ask]:
    return [Ask(prompt, replace(params, logprobs=vocab)) for prompt, params in zip(prompts, PARAMS, strict=True)]


def assert_exact(model: Model, asks: list[Ask], *, settings: dict[str, Any] | None = None, **drafting: Any) -> Rig:
    """In chunks with batch mates, preempted, and once more with prefix hits, against each request alone."""
    common = SETTINGS | (settings or {})
    texts = {name: drafting[name] for name in ("tokenizer", "eos_ids") if name in drafting}
    with Rig(model, **common | {"enable_prefix_caching": False}, **texts) as rig:
        alone = bits_of(rig.run_one_by_one(asks))
    with Rig(model, **common | {"max_num_batched_tokens": 24, "overlap": True}, **drafting) as rig:
        for _ in range(2):
            assert bits_of(rig.run(asks, after_step=rig.preempt)) == alone
        assert rig.scheduler.stats.num_preemptions > 0 and rig.scheduler.cache.stats.hit_tokens > 0
    return rig


def test_an_eagle3_head_changes_no_bit(tmp_path: Path) -> None:
    """It reads hidden states of several layers, so the last layer runs for all tokens of a prompt."""
    asks = asks_for([prompt_of(seed, 19 + 20 * seed) for seed in range(3)], 256)
    head = make_drafter("eagle3", "gemma3", tmp_path).speculative(3)
    rig = assert_exact(tiny_model("gemma3", torch.float32), asks, speculative_config=head)
    assert rig.engine.stats.num_draft_tokens > 0


def test_a_trained_assistant_changes_no_bit() -> None:
    model = load_model(resolve(ASSETS / "gemma4"), dtype=torch.float32, device="cpu")
    asks = asks_for(trained_prompts(41, (33, 18, 40)), model.vocab_size)
    rig = assert_exact(model, asks, speculative_config=SPECULATIVE)
    assert rig.engine.stats.num_accepted_tokens > 0


def test_a_worker_in_a_process_changes_no_bit(tmp_path: Path) -> None:
    folder = str(save_folder(tmp_path / "model", FAMILIES["llama"], seed=11))
    prompts, params = [prompt_of(seed, 20 + seed, 203) for seed in range(3)], [replace(one, n=2) for one in PARAMS[1:]]
    params = [PARAMS[0], *params]
    found = []
    for in_process, at_once in ((False, 1), (True, 3)):
        settings = {"exact": True, "dtype": "float32", "max_num_seqs": at_once, "max_logprobs": 203}
        with started(folder, in_process=in_process, **settings) as llm:
            outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
            found.append([(sample.token_ids, [{token: entry.logprob for token, entry in place.items()}
                                              for place in sample.logprobs or []])
                          for output in outputs for sample in output.outputs])
    assert len(found[0]) == 5 and found[0] == found[1]


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_weights_in_gguf_bits_are_exact(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.formats.gguf.kept_bits_are_fast", lambda: True)
    model = build(QWEN3, {} if bits == 8 else MIXED, keep=True)
    use_activation_bits(model, bits)
    assert_exact(model, asks_for([prompt_of(seed, 12 + 30 * seed, 96) for seed in range(3)], 96))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_bits_of_an_engine_do_not_depend_on_its_threads(family: str) -> None:
    asks = asks_for([prompt_of(seed, 20 + 15 * seed, 203) for seed in range(3)], 203)
    found = []
    for count in (1, 3):
        with threads(count), Rig(model_of(family), **SETTINGS) as rig:
            found.append(bits_of(rig.run(asks)))
    assert found[0] == found[1]


def test_processed_log_probabilities_with_penalties_have_the_same_bits() -> None:
    loud = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "min_p": 0.01, "logit_bias": {5: 2.0}}
    asks = [replace(ask, params=replace(ask.params, **loud))
            for ask in asks_for([prompt_of(seed, 30 + 9 * seed, 203) for seed in range(3)], 203)]
    assert_exact(model_of("gemma4"), asks, settings={"logprobs_mode": "processed"})


@pytest.mark.parametrize("window", [1, 17])
def test_grammars_and_short_windows_have_the_same_bits(window: int) -> None:
    """Texts with a form beside a free one, n-gram drafts, and a softcap of attention."""
    pytest.importorskip("llguidance")
    config = CONFIGS["gemma3"] | {"sliding_window": window, "attn_logit_softcapping": 0.5}
    forms: list[dict[str, Any]] = [{"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
                                   {"choice": ["red", "green", "green tea"]}, {}]
    asks = [replace(ask, params=replace(ask.params, max_tokens=12, ignore_eos=not form,
                                        structured_outputs=StructuredOutputsParams(**form) if form else None))
            for ask, form in zip(asks_for([prompt_of(seed, 40 + 9 * seed) for seed in range(3)], 256), forms,
                                 strict=True)]
    assert_exact(random_model(config, torch.float32, seed=window), asks, eos_ids=(2,),
                 tokenizer=byte_tokenizer(), speculative_config={"method": "ngram", "num_speculative_tokens": 4,
                                                                 "prompt_lookup_min": 1, "auto": False})
