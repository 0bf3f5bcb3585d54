"""Engines: they train a round's jobs. Serial is the definition of all."""
