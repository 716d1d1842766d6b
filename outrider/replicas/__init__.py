"""Several engines behind one HTTP front. The front decides which replica gets a request, passes the request on, and
handles the death of a replica."""
