"""Compare the form in which a model's files are stored with the form that a caller expects. No torch."""

from __future__ import annotations

from outrider.config import FILE_FORMS, QUANTIZATIONS
from outrider.models.sources.gguf import GgufSource
from outrider.models.sources.model_source import ModelSource
from outrider.models.sources.quantization import quantization_section

# Forms of files that may hold what a quantization would make of plain numbers.
HOLDS = {"fp8": ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"), "int4": ("awq", "gptq", "compressed-tensors")}


def check_form(asked: str, source: ModelSource) -> None:
    """Raise ValueError if a model's files are not in the form that `quantization` names, or are quantised in another
    form."""
    form = "gguf" if isinstance(source, GgufSource) else quantization_section(source.config).get("quant_method")
    if asked in FILE_FORMS and form != FILE_FORMS[asked]:
        found = "numbers that are not quantised" if form is None else f"of the form {form!r}"
        advice = " or choose one of " + ", ".join(map(repr, QUANTIZATIONS)) if form is None else ""
        raise ValueError(f"quantization={asked!r}: the files of {source.name} are {found}, and the "
                         f"engine reads this from the files: leave quantization out{advice}")
    if asked in QUANTIZATIONS and form not in (None, "gguf", *HOLDS[asked]):
        raise ValueError(f"quantization={asked!r}: the files of {source.name} are quantised already, in the form "
                         f"{form!r}, which the engine keeps: leave quantization out")
