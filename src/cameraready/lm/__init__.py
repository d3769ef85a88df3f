"""Language models: what to know before you deploy one, and how to get more out of it.

You serve or tune a decoder-only language model with transformers and want to keep less of its cache, explore more when you sample,
quantise it, or mark what it writes. The methods of this room take any such model, leave its weights and hooks as they found them, and
their studies try them on a model of your own.
"""
