"""Studies: experiments of our own, run in one command, with their statistics."""
