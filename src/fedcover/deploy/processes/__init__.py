"""The processes of a deployment: keys, and Flower's servers and nodes as child processes that end with their parent.

Nothing here imports Flower: its programs are called.
"""
