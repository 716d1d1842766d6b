"""Trains draft heads for a model that the engine serves: `outrider train-drafter`. See docs/training.md.

The head is one Llama layer beside the target's frozen embedding. It begins with the target's final norm and output
rows; `--freeze-output` keeps these rows, so that only the layer itself is learned. Its input begins as the last
auxiliary state alone, and queries begin with the weights of keys, so that a slot attends to itself first: on SmolLM2
the loss after 40 steps of 768 tokens is 5.9 with both and 6.6 without. By default the three auxiliary states are
normed before they are joined and the state that is fed back is the normed one (EAGLE 3.1), which holds up better at
long contexts; `--classic` trains the original form for engines that do not know these norms. Auxiliary states are the
residual streams after 2, n/2 and n - 3 of n layers. `--taps` names others (models with fewer than three layers need
it); they are written into the config, which engines do not read alike.

The loss of a pass is the cross-entropy against the target's distribution over the draft vocabulary, at places of the
answer where the target's likeliest token is in that vocabulary. It is averaged over each answer first and then over
answers. Passes are weighted by 0.8 to the power of their number. AdamW (0.9, 0.95), 4% warm-up, cosine, gradients
clipped at 1; float32 weights, and products in bfloat16 on a GPU.

Files: `--file-form hf` (the default) is the form of the original checkpoints, which vLLM and SGLang load:
`architectures: ["LlamaForCausalLMEagle3"]`; tensors `fc`, `midlayer.*`, `norm`, `lm_head`, `fc_norm.0` to `.2` (EAGLE
3.1), `d2t` (what is added to a token of the head to get the target's) and `t2d` (which tokens the head knows).
`--file-form speculators` is the form of that library (`layers.0.*`). A finished run with `--resume` and another form
writes the files again without training.
"""
