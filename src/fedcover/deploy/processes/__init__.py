"""Deployments: keys, and the servers and nodes of Flower as processes that end with whoever started them.

Nothing here imports Flower: its programs are called.
"""
