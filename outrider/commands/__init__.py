"""What the command line does, one file per command. Each has `run(args) -> status`; none is imported before it is asked for."""
