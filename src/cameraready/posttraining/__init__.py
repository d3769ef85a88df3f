"""Post-training: fine-tuning objectives, and reinforcement learning with verifiers.

You post-train a language model with TRL or transformers and argue about the details that decide a run: which clip, which prompts, whose
credit, which loss. The methods of this room are losses, advantages and samplers that plug into those trainers through their public
hooks, and their studies judge them where the truth is known exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cameraready.posttraining._testbed import EnumerableTask
    from cameraready.posttraining._testbed import from_function as enumerable_task

__all__ = ["EnumerableTask", "enumerable_task"]


def __getattr__(name: str) -> Any:
    """A world whose answers can all be listed, for studies ``--on`` a task of one's own; torch is imported when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cameraready.posttraining import _testbed

    return _testbed.EnumerableTask if name == "EnumerableTask" else _testbed.from_function
