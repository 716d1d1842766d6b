"""Sampling masks: the token ids that top-k, top-p and min-p kept at each place where a token was sampled.

A trainer that normalises over these ids computes the probability that the token was drawn with. The ids are read from
the processed log-probabilities that every sampler reports, so drafts, captured steps and kernels need no code for them:
`SamplingParams.num_reported` asks for enough of them. `in_engine.py` checks requests and reads the ids.
"""
