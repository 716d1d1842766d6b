"""Models by family, and how they are built and loaded. Importing this package alone imports no torch."""
