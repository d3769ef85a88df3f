"""What the study runs: problems, competitors with their settings, and measurements of rates and costs."""
