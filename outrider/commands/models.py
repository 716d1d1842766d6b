"""`outrider models`: the model families that are served, with their drafters, files and hub ids.

The text is made from the tables that the engine itself uses. `docs/models.md` is the output of this command with
`--markdown`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator

from outrider.models.catalog import BRIDGED, Family, served
from outrider.models.sources.quantization import methods

PAGE = """# Models

Made by `outrider models --markdown`; a test compares it with the engine's own tables.

Every family runs on a CPU (float32, float64) and on CUDA (bf16), with chunked prefill, prefix caching, preemption,
tensor parallelism, exact mode, and the drafters ngram, suffix, draft_model, eagle, eagle3, block and your own. "Own
drafter" is what comes with a family's checkpoints besides. Weights are read from safetensors, as numbers or as
{methods}, and from GGUF files where that column has a name.

Of checkpoints that see images (`...ForConditionalGeneration`) the text is served, and their [images](images.md) too
where that column says so. A config key that no code reads is refused by name; [checkpoints.md](checkpoints.md) shows
the result for some hundred well-known checkpoints.

| family | architectures | images | own drafter | GGUF | on the hub |
|---|---|---|---|---|---|
{rows}

## Through transformers

Other text decoders run on transformers' own code (`pip install '.[transformers]'`) if it uses transformers'
attention interface. `model_impl="auto"`, the default, takes a family of the table above if there is one, else this
bridge; `"transformers"` always takes the bridge, `"outrider"` never. `outrider env MODEL` says which one is used.

Prefix caching, chunked prefill, preemption, overlap, all sampling parameters, quantised files, adapters, and the
drafters ngram, suffix, draft_model, eagle, eagle3 and your own work as for a family. Layers that compute the same as
this package's are replaced by them. Steps are captured on CUDA unless the model's own code waits for the device.

Refused by name: models with a state of their own (Mamba, convolutions, linear attention), positions as a bias (ALiBi),
masks of their own, several attentions in one layer, experts of an unknown form, encoder-decoders, ropes that depend on
the longest text of a batch, code of a checkpoint (`auto_map`), several ranks, exact mode. A config key that
transformers' config class does not declare has no effect there, and is named in a warning.

Tests compare these architectures with transformers, as tiny random models; others that fit are served too:

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
    return {"family": family.name, "architectures": [*family.architectures], "images": family.seeing,
            "own_drafters": family.own_drafters,
            "gguf": family.gguf_names, "hub_ids": [*family.hub_ids]}


def lines() -> Iterator[str]:
    for family in served():
        yield family.name
        yield f"  architectures  {', '.join(family.architectures)}"
        if family.seeing:
            yield f"  images         {', '.join(family.seeing)}"
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
    bridged = ",\n".join(f"`{name}`{f' ({_code(ids)})' if ids else ''}" for name, ids in BRIDGED.items())
    return PAGE.format(methods=", ".join(methods()), rows="\n".join(map(_row, served())), bridged=bridged)


def _row(family: Family) -> str:
    could_see = [name for name in family.architectures if name.endswith("ForConditionalGeneration")]
    seen = "yes" if family.seeing and family.seeing == could_see else _code(family.seeing)
    lists = (family.architectures, family.own_drafters, family.gguf_names, family.hub_ids)
    first, *others = map(_code, lists)
    return f"| {' | '.join((family.name, first, seen, *others))} |"


def _code(items: Iterable[str]) -> str:
    return ", ".join(f"`{item}`" for item in items)
