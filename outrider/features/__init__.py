"""Features: each folder is one, and imports the core but no other feature. `outrider/feature_list.py` names them.

What each needs of the core, as parts that the core calls without knowing who is there:

| | adapters | logits processors | drafter that learns | pooling | prompt embeddings |
|---|---|---|---|---|---|
| part of a request | the adapter, a key of its pages | extra arguments | | | a key of its pages |
| resource, for a row | a slot on the device, with patience | | | | |
| part of a batch | placements | | | | |
| part of the limits | slots, targets, numbers | | | | |
| part of a step | places, admits and resets rows | rows with their processors | | | |
| deltas of layers' products, by row | low-rank products | | | | |
| edits of logits | | position by position over drafts | | | |
| observes drafts | | | records texts, swaps weights | | |
| reports in results | | | counts, mean runs | | |
| background work | | | the trainer | | |
| keeps for requests | loads, commands to the device | | | | |
| makes outputs of hidden states | | | | vectors, classes, scores | |
| reads keys of a prompt | | | | | vectors and their positions |
| inputs of a prompt's steps | | | | | vectors in place of embeddings |

A part is a contract if two features need the same, or a feature from outside the package may. Grammars, spans and
events of the cache are still in the core. They take part in what the core decides: a grammar's mask and forced tokens
lie between the forward pass and the sampler, spans bound chunks and prefix hits.
"""
