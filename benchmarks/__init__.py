"""Speed and memory of fedcover compared with its peers; `make bench` runs everything. Not part of the package."""
