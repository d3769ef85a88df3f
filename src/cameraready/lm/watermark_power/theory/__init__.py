"""The theory of green-list watermarks: green mass, power, thresholds, frontiers. Numbers in, numbers out; no model is run here."""
