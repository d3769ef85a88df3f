"""The diffusion-information exponent has no sampler; its callback reads models of every convention in test_mixed_cumulant_callback.py."""

CASES = []
