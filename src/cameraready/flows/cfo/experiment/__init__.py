"""The study's problems, arms and trials."""
