"""The processes of a deployment: keys, and Flower's servers and nodes as child processes that end with their parent.

Flower's programs are called as processes; only ``control`` imports Flower, for the orders to a SuperLink.
"""
