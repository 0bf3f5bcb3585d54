"""The paper's experiments and studies of our own, built on fedcover: run, compared and reported in one command."""
