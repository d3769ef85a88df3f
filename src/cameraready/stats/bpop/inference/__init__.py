"""How partial orders are inferred: the likelihood of a trace, the prior, the sampler, and the exact posterior."""
