"""outrider.utils.print_utils: how vLLM's examples show a vector."""

from collections.abc import Sequence

MOST_SHOWN = 4


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """The first numbers of a vector, and how many there are."""
    more = ", ..." if len(embeds) > MOST_SHOWN else ""
    first = ", ".join(map(str, embeds[:MOST_SHOWN]))
    print(f"{prefix}: [{first}{more}] (size={len(embeds)})")
