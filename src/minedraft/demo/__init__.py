"""The models and prompts of the two-command start."""
