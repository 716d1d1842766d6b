"""Latent attention, over the whole context or over positions that an indexer chooses.

DeepSeek-V3, V3.2, GLM-MoE-DSA and HY-V4 keep one compressed vector per token and layer, which all heads share
(`cache/kinds/latent.py`, `mixers/latent/`). Queries are projected into the space of these vectors, so the cache needs
no conversion when it is read. A layer with an *indexer* keeps an index key per token in the same pages, scores all
positions of a context by it, and attends to the best `index_topk`; a layer without one takes the choice of the layer
before it. A context of at most `index_topk` tokens is attended whole. With `index_key_dtype="fp8"` index keys take one
byte a number and a scale, a power of two, each (`ScaledIndexSpec`); they are rounded once, when they are written, so
the choice depends on nothing else. The MTP module has an indexer of its own; its later drafting passes choose again, or
keep the choice of the first pass if the config says so.

In HY-V4 every head has a *sink*, the score of one more key without a value. It belongs to no position and is not
chosen; kernels add its weight where they divide by the sum of weights, for several splits where these are merged. For
the published files the publisher's engines rotate pairs of dimensions and transformers' code rotates halves. Here pairs
are rotated, unless the config has `rope_interleave: false` and `indexer_rope_interleave: false`.

All operations work in flat token space (`kernels/latent.py`): row r of queries, weights, contexts, scores, chosen
positions and outputs belongs to token r of the batch, for prefill, verification and decoding alike. Nothing is packed
by request. Dead and padded tokens choose no positions. If scores are equal, the lower position is chosen. Scores are
computed for a chunk of tokens at a time, within a fixed memory budget. All shapes follow from the batch alone.

On a GPU these steps are captured like all others, so kernels read lengths on the device. The table of operations
chooses among these kernels of `kernels/gpu/` by the step's shape:

- norm, rotate, write: `latent/inputs.py`; `latent/enter_latents.py` also absorbs the queries; `latent/inputs.py`
- score the keys: `index/scores.py`, on Hopper cards `hopper/index_decode.py`; `hopper/index.py`
- choose positions, without a sort: `index/choice.py`: candidates by a sample, then the least chosen score among them
  (`index/search.py`); `index/prefill.py`: one token row's scores in the registers of one program
- attend: `latent/attention.py`, on Hopper cards `hopper/latent_decode.py`, both split over positions; for one token
  row `latent/values.py` merges the splits and multiplies with the values' matrices; `hopper/latent.py` gathers the
  chosen entries once, as keys and as values
- experts: `experts/rows.py`: one or two token rows, with the shared expert; `experts/moe.py`

Other cards use the kernels of few token rows for any number. Token rows whose context is no longer than `index_topk`
leave the indexer's kernels at once, and decode steps that have only contexts of that length get graphs without these
kernels (`GraphKey.longest`). A float64 model has no kernels here, and its steps say so
(`Uncaptured.NO_CAPTURED_KERNELS`)."""
