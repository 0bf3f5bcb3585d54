"""The structure of a module: its layers, batch norms, dropout layers, units and sub-models."""
