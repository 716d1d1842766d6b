"""Optional features, one folder for each. A feature imports the core but no other feature. `outrider/feature_list.py`
names them.

The table shows what each feature adds to the core. The core calls these parts through interfaces, and does not know
which feature implements them:

| | adapters | processors | learning | pooling | spans, vectors, images | grammars | receipts, masks |
|---|---|---|---|---|---|---|---|
| part of a request | adapter, a key of pages | extra arguments | | | a key of pages | lease of a grammar | a writer |
| resource, for a row | a slot, with patience | | | | | | |
| part of a batch | placements | | | | | | |
| part of the limits | slots, targets, numbers | | | | | | |
| part of a step | places, admits, resets | rows with their own | | | | matchers of rows | |
| host's turn in a step | | | | | | masks, forced text, failures, ends | |
| deltas of products | low-rank products | | | | | | |
| edits of logits | | over drafts too | | | | | |
| observes drafts | | | texts, weights | | | | |
| reports in results | | | counts, mean runs | | | | |
| background work | | | the trainer | | | | |
| keeps for requests | loads | | | | | leases | |
| orders to a worker | commands | | | | | errands: compile, drop | |
| outputs of hidden states | | | | vectors, classes, scores | | | |
| adds to samples | | | | | | | receipts, kept ids |
| reads keys of a prompt | | | | | ranges; vectors; images | | |
| inputs of a prompt's tokens | | | | | who sees whom, cuts, keys, ropes | | |
| is loaded by | a setting | a setting | a setting | a request | a request | a request | a request, a setting |

`tiers` stores cached pages outside the device's memory. It makes the scheduler's cache (`EngineFeature.make_cache`);
its part of a step copies pages and reports the copies (`StepPart.amend_result`).

A part has an interface of its own if two features need it, or if a feature from outside the package may need it. Events
of the cache are still in the core.

Two files of the core name grammars: `core/params.py` has the parameter `structured_outputs`, and `core/structured.py`
its class. Users build both before there is an engine. Without the feature's folder a request with this parameter is
refused by name."""
