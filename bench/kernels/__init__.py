"""`jpaged bench kernels`: checks and times paged attention."""
