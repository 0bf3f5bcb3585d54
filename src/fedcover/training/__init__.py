"""Local training: the task, the recipe, the training of one client, and fast training steps."""
