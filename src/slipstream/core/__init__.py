"""Records, options and errors that every other part shares; imports nothing of ours and no torch."""
