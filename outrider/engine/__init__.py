"""The loop, the life of a request, text in and out."""
