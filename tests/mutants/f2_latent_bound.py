"""F2: latent layers look at as many positions as the longest context there may be has."""

from __future__ import annotations

from dataclasses import replace

from outrider.cache.groups import Group
from outrider.mixers.batch import BatchView
from outrider.mixers.latent import latent_mixer

NAME = "f2: latent layers are bounded by max_model_len"
TESTS = [
    "tests/drafters/test_f2_bounds.py::test_f2_hybrids_latent_layers_and_the_assistant_are_bounded_by_the_batch[deepseek_v32]",
]


def apply() -> None:
    plan_group = latent_mixer.plan_group

    def unbounded(view: BatchView, group: Group) -> latent_mixer.GroupPlan:
        plan, table = plan_group(view, group), view.page_tables[group.index]
        return replace(plan, num_positions=table.shape[1] * group.page_tokens,
                       contexts=plan.contexts._replace(page_table=table))

    latent_mixer.plan_group = unbounded
