"""Structured output on the card: steps with it replay captured halves, with masks that the host writes in between."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from outrider.core import StepForm, Uncaptured
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from tests.engine.harness import Ask, Rig, prompt_of
from tests.engine.stripes import FORM, StripeGrammars
from tests.gpu.rig import LENGTH, SETTINGS, VOCAB, GpuRig, assert_same_tokens, loaded
from tests.gpu.test_engines import folder_of, spec

pytestmark = [pytest.mark.gpu, pytest.mark.together("llama")]
END = 2
OTHERS = [{"top_p": 0.9}, {}, {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.3}]


def grammars() -> StripeGrammars:
    return StripeGrammars(VOCAB, LENGTH, END)


def asks() -> list[Ask]:
    """Texts with a form, greedy and sampled, beside texts without."""
    asked = []
    for i, others in enumerate([*OTHERS, *OTHERS]):
        common = {"temperature": 0.8, "seed": i, "max_tokens": LENGTH + 5, "ignore_eos": True}
        params = SamplingParams(**common | others)  # type: ignore[arg-type]
        if i < len(OTHERS):
            params = replace(params, structured_outputs=FORM, ignore_eos=False)
        asked.append(Ask(prompt_of(i, 4 + 7 * i), params))
    return asked


@functools.cache
def reference() -> list[RequestOutput]:
    """Every request alone, on the CPU in float64, with all log-probabilities."""
    settings = SETTINGS | {"attention_backend": "torch", "max_num_seqs": 1, "enable_prefix_caching": False,
                           "logprobs_mode": "processed"}
    model = loaded(folder_of("llama"), on_cpu=True, dtype=torch.float64)
    with Rig(model, grammars=grammars(), eos_ids=(END,), **settings) as rig:
        return rig.run_one_by_one([Ask(ask.prompt, replace(ask.params, logprobs=-1)) for ask in asks()])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_steps_with_a_grammar_replay_captured_halves(drafter: str, overlap: bool) -> None:
    config = None if drafter == "none" else spec("ngram") | {"prompt_lookup_min": 1}
    own = grammars()
    with GpuRig(loaded(folder_of("llama")), speculative_config=config, grammars=own, eos_ids=(END,),
                overlap=overlap) as rig:
        outputs = rig.run(asks())
        assert own.num_masks > 0
        assert set(rig.engine.stats.uncaptured) <= {Uncaptured.NEW_SIZE}, rig.engine.stats.uncaptured_line
        forms = {key.form for key in rig.runner.graphs.captured}
        assert forms == set(StepForm)
        scaled_by_one = [ask if ask.params.is_greedy else replace(ask, params=replace(ask.params, temperature=1.0))
                         for ask in asks()]
        assert_same_tokens(outputs, reference(), scaled_by_one)
        texts = [output.outputs[0].token_ids for output in outputs[: len(OTHERS)]]
        assert all(len(text) == LENGTH + 1 and text[-1] == END for text in texts)
        assert all(token in own.allowed(i) for text in texts for i, token in enumerate(text))
        if drafter == "ngram":  # forced tokens
            assert sum(output.metrics.num_accepted_tokens for output in outputs[: len(OTHERS)]) > LENGTH
        num_split = sum(key.form is StepForm.SPLIT for key in rig.runner.graphs.captured)
        rig.run(asks()[len(OTHERS) :])
        assert num_split == sum(key.form is StepForm.SPLIT for key in rig.runner.graphs.captured)
