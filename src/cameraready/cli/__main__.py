"""``python -m cameraready.cli``, for a source tree whose script is not installed."""

from cameraready.cli import main

main()
