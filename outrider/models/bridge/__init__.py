"""The bridge: runs models that have no family here with the modelling code of transformers, on the engine's token rows.

transformers is an optional dependency, so only `registry` imports this package, and only for an architecture without a
family. `model.py` has the `Model` that the engine runs. A model is made in these steps:

1. `installed.py` finds the class, and refuses by name what cannot be served. The model is built on the meta device.
2. `replace.py` replaces modules that `known.py` recognises by layers of this package. A module is recognised by its
  results with small random weights, not by its class name.
3. `outline.py` runs the model once without memory. Heads, sizes, scales, windows, softcaps and sinks come from the
  calls that attention modules make; a mask's window is found by asking the mask function about tokens at its edges.
  Linear modules that are called with the same tensor become one product.
4. `buffers.py` gives memory to what stays transformers' own, recomputes the tables of its constructors, and checks
  them.

In a step the model gets all token rows as one sequence with their positions. transformers makes no masks for the
attention function named `outrider`, which passes q, k and v to the mixer of its layer. Layers of this package read the
step's context from a `CurrentStep` that the model sets, because transformers' code passes none. The causal model's own
forward makes the logits, with its scales and limits. Auxiliary states are the outputs of its decoder layers. If its
code asks for a tensor's value, steps run uncaptured (`Uncaptured.MODEL_READS`)."""
