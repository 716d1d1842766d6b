"""The gated delta rule (Qwen3-Next, Kimi Linear).

Begin with `steps.py`, the wrapper and the launch that takes states through a batch token by token. Long runs go in
chunks: `prepare.py` computes what needs no state, `scan.py` goes through the chunks. `parts.py` has the types that
these functions pass.
"""
