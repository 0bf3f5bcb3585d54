"""The paper: its printed tables, their arithmetic, our runs of its experiments, and the report on them."""
