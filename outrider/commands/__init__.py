"""The commands of the command line, one file each with `run(args) -> status`, imported when the command is called."""
