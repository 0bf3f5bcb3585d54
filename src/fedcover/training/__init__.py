"""Local training: the task, the recipe, one client's training, and fast training steps."""
