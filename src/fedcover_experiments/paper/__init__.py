"""The paper's tables and figures: what it printed, what follows by arithmetic, and what a run gives."""
