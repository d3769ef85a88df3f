"""The command line: `cameraready`."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `cameraready` script."""
    from cameraready.cli.app import app

    app()
