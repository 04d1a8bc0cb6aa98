"""Training a drafter: masks, losses, optimisers, the loop and its checkpoints; reads features, decodes nothing."""
