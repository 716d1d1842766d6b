"""GuidedDecodingParams: the name of StructuredOutputsParams in earlier versions of vLLM. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from outrider.core.fields import shown
from outrider.core.structured import FORMS, StructuredOutputsParams

log = logging.getLogger("outrider")
OWN_BACKENDS = (None, "auto", "guidance")


@dataclass(frozen=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """`SamplingParams(guided_decoding=GuidedDecodingParams(...))` is `SamplingParams(structured_outputs=...)`."""

    backend: str | None = None
    backend_was_auto: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend not in OWN_BACKENDS:
            log.warning("guided_decoding: backend=%s has no effect: grammars are compiled by llguidance",
                        shown(self.backend))

    @classmethod
    def from_optional(cls, **given: Any) -> GuidedDecodingParams | None:
        """Make the parameters from keyword arguments; None if no form is asked for. `json` may be a pydantic class,
        from which the schema is read."""
        given = {name: value for name, value in given.items() if value is not None}
        if not any(given.get(form) for form in FORMS):
            return None
        schema_of = getattr(given.get("json"), "model_json_schema", None)
        if schema_of is not None:
            given["json"] = schema_of()
        return cls(**given)
