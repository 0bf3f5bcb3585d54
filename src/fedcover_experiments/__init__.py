"""Experiments built on fedcover: the paper's tables and further studies, run, compared and reported by one command."""
