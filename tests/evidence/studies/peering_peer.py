"""The peer of `peering.py`; runs in another process."""

import os


def double(x):
    return 2 * x


def process_id():
    return os.getpid()


def end_yourself():
    os._exit(9)
