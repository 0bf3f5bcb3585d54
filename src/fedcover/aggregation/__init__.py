"""Aggregation: how the updates of a round's clients become the next global model, region by region."""
