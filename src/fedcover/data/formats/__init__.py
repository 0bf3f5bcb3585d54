"""Readers of the file formats that data sets are published in."""
