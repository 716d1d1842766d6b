"""Pooling: embeddings, scores and classes made of the hidden states of prompts.

The classes that users call are in `outrider/pooling_params.py` and `outrider/pooling_outputs.py`. The core reports
hidden states with the results of steps (`core/hidden_request.py`); this feature makes vectors of them."""
