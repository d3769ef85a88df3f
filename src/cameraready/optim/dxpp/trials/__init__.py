"""The trials of the study: what is tried, by which arms, and what is measured."""
