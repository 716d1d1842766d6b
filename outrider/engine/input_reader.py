"""InputReader: reads the inputs that a prompt gives to a feature beside its text or token ids, such as embeddings. No
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.core.hidden_params import RequestParams
from outrider.core.input_part import InputPart
from outrider.engine.served_model import ServedModel


class InputReader:
    """Reads one prompt that has a key of the feature (`FeatureEntry.prompt_keys`). Any method may raise a ValueError
    that tells the user what to change."""

    has_ids = True  # False: the prompt has no token ids; zeros hold the places of its inputs

    def __init__(self, prompt: Mapping[str, Any], params: RequestParams, model: ServedModel) -> None:
        """prompt: its values have the declared types, which was checked before."""

    def token_ids(self, own: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return the token ids of the prompt. own: returns the ids that the prompt gives, or tokenizes its text."""
        return own()

    def make_parts(self, token_ids: Sequence[int]) -> Sequence[InputPart]:
        """Make the parts that the prompt adds to the request. The given token ids have been checked."""
        raise NotImplementedError
