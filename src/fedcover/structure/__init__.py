"""What a module is made of: its layers, batch norms, dropouts, units and sub-models."""
