"""Stands for `vllm.utils.print_utils`: the function by which vLLM's examples print a vector."""

from collections.abc import Sequence

MOST_SHOWN = 4


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector, and how many numbers it has."""
    more = ", ..." if len(embeds) > MOST_SHOWN else ""
    first = ", ".join(map(str, embeds[:MOST_SHOWN]))
    print(f"{prefix}: [{first}{more}] (size={len(embeds)})")
