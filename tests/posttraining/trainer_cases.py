"""What each method of the room hands to the conformance test that its trainers share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class TrainerCase:
    """A way to use a method in TRL, as its user would.

    A method's cases stand in ``tests/posttraining/<folder>_cases.py`` as ``CASES``. That module must import without TRL: import a
    trainer inside the function that makes it.

    Attributes
    ----------
    name : str
    make : callable
        ``make(model, tokenizer, args, dataset, reward_funcs)`` -> the trainer with the method on. The same five arguments as
        `cameraready.posttraining._runs.grpo_run` gives; `args` is a `GRPOConfig` or `SFTConfig` with `settings` in it, `reward_funcs` a list
        of reward functions (None with ``host="sft"``).
    off : callable
        The same with the method off: its losses and weights must be TRL's own, to 1e-6.
    host : {"grpo", "sft"}
        Which of TRL's trainers `off` is compared with.
    settings : mapping
        Settings of the config, for the method and for the reference alike (``{"loss_type": "dapo"}``).
    reference : callable, optional
        TRL's own trainer, where it is not simply `GRPOTrainer` or `SFTTrainer` with `settings`.
    config : callable, optional
        Makes the method's `args` from settings as keywords, where it has a config class or defaults of its own; TRL's trainer gets a plain one.
    state : callable, optional
        ``state(trainer)`` -> a dict of tensors and numbers: what the method remembers, which a resumed run must have too.
    differs : bool
        Whether three steps with the method on end elsewhere than TRL's own do.
    """

    name: str
    make: Callable[..., Any]
    off: Callable[..., Any]
    host: Literal["grpo", "sft"] = "grpo"
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None
    config: Callable[..., Any] | None = None
    state: Callable[[Any], Mapping[str, Any]] | None = None
    differs: bool = True
