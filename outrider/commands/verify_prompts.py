"""Requests of `outrider verify`: three questions about one passage (a shared beginning), an edit, code, free text."""

from __future__ import annotations

PASSAGE = (
    "The lighthouse at Kell Point was built in 1871 from grey granite that was cut on the island itself. Its lamp "
    "burned whale oil at first, then paraffin, and since 1934 it has been electric. Three keepers lived there with "
    "their families until the light was made automatic in 1982. The tower is 41 metres high, and on a clear night its "
    "two white flashes every fifteen seconds can be seen from 24 miles away."
)
PROMPTS = [
    f"{PASSAGE}\n\nCopy the passage word for word.",
    f"{PASSAGE}\n\nWhen was the lighthouse built, and from what stone?",
    'Rename the variable "n" to "count" in this function and print the whole function:\n\n'
    "def total(values):\n    n = 0\n    for value in values:\n        n = n + value\n    return n\n",
    f"{PASSAGE}\n\nList the three kinds of lamp in order, one per line.",
    "Write two sentences about rain in the mountains.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog",
]
