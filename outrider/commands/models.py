"""`outrider models`: the model families that are served, with their drafters, files and hub ids.

The text is made from the tables that the engine itself goes by; `docs/models.md` is this command's `--markdown`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from outrider.models.catalog import BRIDGED, Family, served
from outrider.models.sources.quantization import methods

PAGE = """# Models

Made by `outrider models --markdown`; a test holds it against the tables that the engine goes by.

Every family runs on a CPU (float32, float64) and on CUDA (bf16), with chunked prefill, prefix caching, preemption,
tensor parallelism, exact mode, and the drafters ngram, suffix, draft_model, eagle, eagle3, block and your own. The
column "own drafter" names what comes with a family's checkpoints beside these. Weights are read from safetensors, as
numbers or in these forms: {methods}. GGUF files are read of the families that have a name in that column.

Of checkpoints that see images (`...ForConditionalGeneration`) the text is served. A config key that no code reads is
refused by name; [checkpoints.md](checkpoints.md) says it of the configs of some hundred well-known checkpoints.

| family | architectures | own drafter | GGUF | on the hub |
|---|---|---|---|---|
{rows}

## Through transformers

Other decoders of text are computed by transformers' own code (`pip install 'outrider[transformers]'`), if it routes
its attention through transformers' attention interface. `model_impl="auto"`, the default, takes a family of the table
above where there is one and this bridge otherwise; `"transformers"` always takes the bridge, and `"outrider"` never.
`outrider env MODEL` says which of them computes a model.

Attention, its cache, the embedding and the product that makes logits are the engine's. Linear layers, RMS norms, gated
MLPs, experts and plain attention with a rope are replaced by layers of this package where their code computes the same,
which is found out by running it on small random numbers. So prefix caching, chunked prefill, preemption, overlap, all
sampling parameters, quantised files, adapters, and the drafters ngram, suffix, draft_model, eagle, eagle3 and your
own work as for a family. Steps are captured on CUDA unless the model's own code waits for values on the device; these
steps are counted under that reason.

Not served, and refused by name: models with a state of their own (Mamba, convolutions, linear attention), positions as
a bias (ALiBi), masks of their own, several attentions in one layer, experts of an unknown form, encoder-decoders, ropes
that depend on the longest text of a batch, code of a checkpoint (`auto_map`), several ranks, exact mode.

A config key that transformers' class of the config does not declare changes nothing there, so it is named in a warning
and not refused.

These architectures are held against transformers by tests, as tiny random models; others that fit are served too.

| architecture | on the hub |
|---|---|
{bridged}
"""


def run(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps([as_dict(family) for family in served()], indent=2))
    elif args.markdown:
        print(page(), end="")
    else:
        for line in lines():
            print(line)
    return 0


def as_dict(family: Family) -> dict[str, object]:
    return {"family": family.name, "architectures": [*family.architectures], "own_drafters": family.own_drafters,
            "gguf": family.gguf_names, "hub_ids": [*family.hub_ids]}


def lines() -> Iterator[str]:
    for family in served():
        yield family.name
        yield f"  architectures  {', '.join(family.architectures)}"
        if family.own_drafters:
            yield f"  own drafter    {', '.join(family.own_drafters)}"
        if family.gguf_names:
            yield f"  GGUF           {', '.join(family.gguf_names)}"
        if family.hub_ids:
            yield f"  on the hub     {', '.join(family.hub_ids)}"
    yield ""
    yield "All run on a CPU and on CUDA, with the drafters ngram, suffix, draft_model, eagle, eagle3 and block."
    yield f"Quantised files: {', '.join(methods())}, and GGUF where it is named."
    yield ""
    yield "Through transformers' own code (pip install 'outrider[transformers]'), others that fit among them:"
    yield from (f"  {name}" for name in BRIDGED)


def page() -> str:
    bridged = "\n".join(f"| `{name}` | {', '.join(f'`{each}`' for each in ids)} |" for name, ids in BRIDGED.items())
    return PAGE.format(methods=", ".join(methods()), rows="\n".join(map(_row, served())), bridged=bridged)


def _row(family: Family) -> str:
    cells = (family.name, *(", ".join(f"`{item}`" for item in items) for items in (
        family.architectures, family.own_drafters, family.gguf_names, family.hub_ids)))
    return f"| {' | '.join(cells)} |"
