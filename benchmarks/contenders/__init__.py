"""Programs that play federated rounds on demand, one process each; see ``benchmarks.player``."""
