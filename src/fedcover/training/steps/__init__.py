"""Implementations of the training step: by autograd, traced, and in C."""
