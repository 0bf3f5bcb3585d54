"""Masks: their coverage, the clients that hold each entry, their encoding, their cost, and masks by design."""
