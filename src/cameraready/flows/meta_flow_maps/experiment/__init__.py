"""What the study of meta flow maps measures, and on what."""
