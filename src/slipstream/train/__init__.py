"""Training a drafter: masks, losses, optimisers, the loop, checkpoints; reads features, decodes nothing."""
