"""What a forward pass costs: V of the target, t of the drafter, as curves in seconds."""
