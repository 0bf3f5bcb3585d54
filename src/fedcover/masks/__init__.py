"""Masks: coverage, holders, encoding, cost, and masks by design."""
