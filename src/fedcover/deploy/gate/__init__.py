"""The gate of a server: what nodes reach instead of the SuperLink, which forwards only what nodes need."""
