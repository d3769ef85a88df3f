"""Competitors in environments of their own: built by uv or pip, spoken to through execnet."""
