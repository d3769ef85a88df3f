"""A scheduler's SideNet in its configuration and its files, in the ways that diffusers saves, loads and converts schedulers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.flows.ba_solver.sidenet import WEIGHTS, _Side, from_settings
from cameraready.flows.ba_solver.stepping import Side

#: Told apart from None, which asks for no SideNet.
_UNSAID: Any = object()
_LATER: Any = object()

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler as _Scheduler
else:
    _Scheduler = object


class WithSide(_Scheduler):
    """Stands before a scheduler class of diffusers among the bases of one that has a SideNet."""

    _side: Side | None = None

    @property
    def side(self) -> Side | None:
        """The SideNet; may be set, which also puts its settings into the configuration."""
        return self._side

    @side.setter
    def side(self, side: Side | None) -> None:
        self._side = side
        self.register_to_config(sidenet=side.settings if isinstance(side, _Side) else None)

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As of diffusers; takes the configuration of any flow scheduler, and `side`.

        Raises
        ------
        ValueError
            The configuration is that of a scheduler for networks that predict noise, or has a SideNet and `side` is not given.
        """
        side = kwargs.pop("side", _UNSAID)
        config = dict(config or {})
        if side is _UNSAID and config.get("sidenet") is not None:
            raise ValueError(
                "the configuration has a SideNet, whose weights are not in it: give side=scheduler.side, or side=None for no SideNet"
            )
        kind = config.get("prediction_type", "flow_prediction")
        if kind != "flow_prediction":
            raise ValueError(
                f"{config.get('_class_name', 'the scheduler')} is set for {kind!r}; BAScheduler is for flow-matching networks, which predict a velocity"
            )
        if "flow_shift" in config and "shift" not in config:
            config["shift"] = config["flow_shift"]
        made = super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)
        if side is not _UNSAID and side is not _LATER:
            (made[0] if return_unused_kwargs else made).side = side
        return made

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any = None, subfolder: str | None = None, **kwargs: Any
    ) -> Any:  # type: ignore[override]
        """As of diffusers; the SideNet is read from beside the configuration, in a folder on this machine.

        Raises
        ------
        FileNotFoundError
            The configuration names a SideNet and its weights are not there.
        """
        kwargs.setdefault("side", _LATER)
        later = kwargs["side"] is _LATER
        made = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        scheduler = made[0] if isinstance(made, tuple) else made
        settings = scheduler.config.get("sidenet")
        if settings is not None and later:
            folder = Path(str(pretrained_model_name_or_path)) / (subfolder or "")
            if not (folder / WEIGHTS).is_file():
                raise FileNotFoundError(
                    f"the configuration has a SideNet and there is no {WEIGHTS} in {folder}; download the repository (huggingface_hub.snapshot_download), or give side="
                )
            scheduler.side = from_settings(settings).load_weights(folder)
        return made

    def save_config(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """As of diffusers, which calls it in `save_pretrained`; with the SideNet as safetensors beside the configuration.

        Raises
        ------
        ValueError
            The SideNet is a plain function, which has no weights to save.
        """
        if self._side is not None:
            if not isinstance(self._side, _Side):
                raise ValueError(
                    f"the SideNet is a {type(self._side).__name__} and cannot be saved; a SideNet or MLPSideNet can"
                )
            self._side.save_pretrained(save_directory)
        super().save_config(save_directory, push_to_hub=push_to_hub, **kwargs)
