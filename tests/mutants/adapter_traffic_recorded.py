"""Texts of requests with adapters are recorded, and the drafter learns from what other weights said."""

from __future__ import annotations

from dataclasses import replace

from outrider.core import Admission
from outrider.features.learning import traffic

NAME = "adapter traffic recorded"
TESTS = ["tests/learning/test_traffic.py", "-k", "never_recorded"]


def apply() -> None:
    may_record = traffic._may_record

    def may_record_adapters(admission: Admission) -> bool:
        return may_record(replace(admission, request=replace(admission.request, parts=())))

    traffic._may_record = may_record_adapters
