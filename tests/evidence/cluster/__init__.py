"""Runs on clusters of real Dask schedulers and workers, each a machine of its own where the system allows it."""
