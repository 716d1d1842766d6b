"""The public imports for receipts; see docs/exactness.md. The implementation is in `outrider/features/receipts/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.features.receipts.asked_again import engine_settings, num_tokens
    from outrider.features.receipts.comparison import REFUSED, Verdict
    from outrider.features.receipts.receipt import Receipt, read_key
    from outrider.features.receipts.replay import check_receipt, find_receipts, replay
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["REFUSED", "Receipt", "Verdict", "check_receipt", "engine_settings", "find_receipts", "num_tokens",
           "read_key", "replay"]
