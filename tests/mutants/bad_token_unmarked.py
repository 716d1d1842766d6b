"""The torch backend takes bad tokens for finite ones, so that a query which sees one does not fail."""

from __future__ import annotations

import torch

from outrider.mixers.paged.codecs import DecodedTokens, ModelCodec, Parts

NAME = "bad tokens unmarked"
TESTS = ["tests/unit/test_extending_cache.py::test_a_bad_token_fails_its_request_alone"]


def apply() -> None:
    decode = ModelCodec.decode

    def all_finite(self: ModelCodec, parts: Parts, dtype: torch.dtype) -> DecodedTokens:
        decoded = decode(self, parts, dtype)
        return DecodedTokens(decoded.k.nan_to_num(0.0), decoded.v, torch.ones_like(decoded.is_finite))

    ModelCodec.decode = all_finite  # type: ignore[method-assign]
