"""Spans of a prompt whose tokens see each other in both directions: `bidirectional_spans` of a prompt."""
