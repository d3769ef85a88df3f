"""The study's own machinery: a synthetic continuum of priors, short runs of adapters on language models, memory and time."""
