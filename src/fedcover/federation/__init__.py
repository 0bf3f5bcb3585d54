"""A federation and its rounds: planning, feedback, evaluation, history, checkpoints and run folders."""
