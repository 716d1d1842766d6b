"""Several engines behind one HTTP front: which replica gets a request, how it is passed on, and what
happens when one dies."""
