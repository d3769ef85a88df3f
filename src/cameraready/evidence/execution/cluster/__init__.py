"""Trials on the hosts of a Dask cluster: Dask ships them, each host runs the pool, only the driver writes the ledger.

On the driver, a `session.Session` deals trials out (`field`, `board`). In every Dask worker, `carrier` holds the tasks
that Dask calls; they speak with a `host`, a plain process that owns the crew of worker processes. Dask's own workers
may not have children where a nanny runs them, and must not die of what a trial does.
"""
