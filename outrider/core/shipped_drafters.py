"""The table of drafters that come with the package, by model. An engine uses its model's drafter if its
`speculative_config` is "auto". This is not the default, because a drafter does not make every kind of text faster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "drafters" / "shipped"


@dataclass(frozen=True)
class ShippedDrafter:
    method: str
    folder: Path
    num_drafts: int  # most drafts of a step; how many pay is chosen every step

    @property
    def speculative_config(self) -> dict[str, Any]:
        return {"method": self.method, "model": str(self.folder), "num_speculative_tokens": self.num_drafts}

    @property
    def is_there(self) -> bool:
        return (self.folder / "model.safetensors").is_file()


SHIPPED = {"smollm2": ShippedDrafter("eagle3", FOLDER / "smollm2", 4)}
