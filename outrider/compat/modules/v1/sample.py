"""outrider.v1.sample: a module of vLLM that is not here."""

from outrider.compat.not_here import not_here

raise not_here(__name__, "use logit_bias, bad_words, allowed_token_ids or structured_outputs of SamplingParams")
