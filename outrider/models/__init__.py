"""Models by family, and how they are built and loaded. Importing the package imports no torch."""
