"""What the study runs: flows, arms, trials."""
