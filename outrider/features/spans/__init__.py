"""Spans of a prompt whose tokens attend to each other in both directions, for models with bidirectional parts:
`bidirectional_spans` of a prompt."""
