"""Speed and memory of fedcover beside its peers; `make bench` runs it all. Not part of the package."""
