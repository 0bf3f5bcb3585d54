"""Runs described in TOML: the schema, and the federation that a configuration describes."""
