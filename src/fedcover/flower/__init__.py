"""Federations over Flower: an optional extra, ``pip install 'fedcover[flower]'``."""
