"""An update of weights leaves the cache as it is: prompts go on from keys and values of the old weights.

The cache is emptied, and keys of pages name the version of the weights. Either is enough, so the mutant breaks both.
"""

from __future__ import annotations

from outrider.cache.manager import CacheManager

NAME = "update keeps cache"
TESTS = ["tests/engine/test_update_weights.py", "-k", "llama and ngram and not elsewhere"]


def apply() -> None:
    def forget_unsettled_only(self: CacheManager) -> None:
        self.forget_unsettled(())

    def keep_version(self: CacheManager, version: int) -> None:
        pass

    CacheManager.forget_all = forget_unsettled_only  # type: ignore[method-assign]
    CacheManager.use_weights = keep_version  # type: ignore[method-assign]
