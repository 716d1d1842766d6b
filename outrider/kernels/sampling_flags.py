"""Bits of a row's sampling flags: which stages of the sampler the row's request needs. Kernels read them.

A row whose flags are 0 needs only a draw at its temperature; all other stages leave it unchanged.
"""

ALLOWED = 1  # allowed_token_ids
BIAS = 2  # logit_bias
BAD_WORDS = 4
MIN_TOKENS = 8
PENALTIES = 16
TOP_K = 32
TOP_P = 64
MIN_P = 128
MASKED = 256  # a feature writes a mask of allowed tokens for each logit row

LISTED = BIAS | BAD_WORDS | MIN_TOKENS  # single logits change, by a list of token ids
EDITED = ALLOWED | LISTED | PENALTIES | MASKED  # logits change before the temperature divides them
SEARCHED = TOP_K | TOP_P  # a threshold has to be searched for
FILTERED = SEARCHED | MIN_P

# A row's token counts: one int32 for each token of the vocabulary.
IN_PROMPT = 1 << 30  # the prompt holds the token
OUTPUTS = IN_PROMPT - 1  # how often the outputs hold the token
