"""How trials are run and kept: keys, the ledger, the pool of worker processes."""
