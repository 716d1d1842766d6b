"""The bridge: models that no family here serves, run by transformers' own modelling code on the engine's token rows.

Only `registry` imports this package, when a config's architecture has no family here: transformers is an extra.
`model.py` has the `Model` that the engine runs. `installed.py` finds the class and refuses by name what cannot be
served. The model is built on the meta device. `replace.py` puts layers of this package in the place of modules that
`known.py` recognises: it gives a copy of the module small random weights and compares its result with a layer's
arithmetic, so names of classes do not count. `outline.py` then runs the model once without memory: heads, sizes,
scales, windows, softcaps and sinks are those of the calls that its attention modules made, and a mask's window is
found by asking the mask function about tokens at its edges. Linear modules that were called with the same tensor
become one product. Last, `buffers.py` gives what stays transformers' own its memory; tables that the constructors
computed are computed again, and that is checked.

In a step the model gets all token rows as one sequence, with their positions. transformers makes no masks for the
attention function named `outrider`; the function hands q, k and v to the mixer of its layer. Modules of ours read the
step's context from a `CurrentStep` that the model sets, since transformers' code passes none. Logits are made by the
causal model's own forward over given hidden states, so scales and limits of logits are its own. Auxiliary states are
the outputs of its decoder layers. If the outline saw the code ask for a value of a tensor, steps run uncaptured
(`Uncaptured.MODEL_READS`).
"""
