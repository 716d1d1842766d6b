"""What the command line does, one file per command with `run(args) -> status`, imported when it is asked for."""
