"""What `outrider bench KIND` measures: one file for each kind, with `run(args) -> status`, and what they share."""
