"""The gated delta rule (Qwen3-Next, Kimi Linear).

Begin with `steps.py`: its kernel advances the states of a batch token by token. Long runs of tokens go in chunks:
`prepare.py` computes everything that does not need the state, and `scan.py` advances the state through the chunks.
`parts.py` has the types that these functions pass.
"""
