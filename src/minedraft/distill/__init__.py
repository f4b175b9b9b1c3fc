"""Making a drafter for a target: `minedraft distill`."""
