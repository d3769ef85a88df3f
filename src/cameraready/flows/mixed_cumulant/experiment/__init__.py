"""What the study of the method runs."""
