"""Models by family, with the code that builds and loads them. Importing the package imports no torch."""
