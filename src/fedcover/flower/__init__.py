"""Federations over Flower: what travels between server and clients, and how replies are checked."""
