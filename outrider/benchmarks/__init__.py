"""The benchmarks of `outrider bench KIND`: one file for each kind, with `run(args) -> status`, and shared parts."""
