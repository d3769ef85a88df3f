"""TRL's GRPO trainer with paced selection of prompts and the trajectory-balance loss, through its public hooks alone."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import get_last_checkpoint

from cameraready.posttraining._logprobs import completion_logprobs
from cameraready.posttraining._trl import import_trl
from cameraready.posttraining.paced.balance import tb_loss
from cameraready.posttraining.paced.embedding import prompt_embeddings
from cameraready.posttraining.paced.head import PartitionHead
from cameraready.posttraining.paced.replay import ErrorReplay
from cameraready.posttraining.paced.rewards import Heard, misfit, positions, with_indices
from cameraready.posttraining.paced.sampler import PacedSampler
from cameraready.posttraining.paced.saving import STATE, Saving, read_state
from cameraready.posttraining.paced.settings import PacedSettings, check_config

_GRPOTrainer: Any = import_trl().GRPOTrainer


class PacedGRPOTrainer(_GRPOTrainer):
    """`trl.GRPOTrainer` that picks prompts of medium difficulty by a learned log-partition, and trains by trajectory balance.

    Parameters
    ----------
    model, reward_funcs, *args, **kwargs
        As of `trl.GRPOTrainer`. `reward_funcs` are functions (also asynchronous ones); `train_dataset` a dataset that can be indexed, every
        prompt once.
    settings : PacedSettings, optional
    embeddings : Tensor, shape (len(train_dataset), F), optional
        By default the model's own mean hidden states of each prompt, one pass over the pool before training.

    Attributes
    ----------
    head : PartitionHead
        ``head.accuracy()`` is the present estimate for every prompt of the dataset.
    pacer : PacedSampler
    replay : ErrorReplay or None

    Raises
    ------
    ValueError
        A reward model in place of a function, a streamed dataset, prompts that stand in it twice, or a pool smaller than two batches. With
        ``loss="tb"`` also sampling from a truncated distribution (top_p, top_k, min_p, repetition_penalty), whose log-probabilities are not those
        that TRL computes, and a penalty ``beta`` of the config, which this loss does not have.

    Notes
    -----
    Kim et al., 2026, arXiv:2602.12642. The estimate is fitted to a batch's rewards before the first loss on it is computed, when policy and
    sampler are the same. accelerate fetches one batch ahead: with ``num_iterations=1`` the prompts of a batch are chosen before the rewards
    of the batch before are known, one update behind; with more iterations none (logged as ``paced/staleness``). The estimate of a batch is
    made on every process from all processes' rewards, so that all choose the same prompts.

    The loss is of the order of ``1 / tb_beta^2`` and its gradient ``2 / tb_beta`` times GRPO's: with TRL's ``max_grad_norm=1`` nearly every step
    is clipped to length 1. AdamW undoes any scale, so that GRPO's learning rate is the one to begin with; with SGD it is not.

    The loss is a mean over all rows of a step, those left out counting 0. It takes the log-probabilities of vLLM where TRL has them, else those of the policy before the first step. Logged beside TRL's:
    ``paced/estimate`` over the pool, ``paced/error`` of the estimate on each batch before it is learned, ``paced/all_right`` and
    ``paced/all_wrong`` groups, ``paced/beta_kl`` (what Proposition 4.1 subtracts), ``paced/left_out`` sequences without a score or token,
    ``paced/replayed`` and ``paced/replay_age``. The state is saved with each checkpoint; ``train(resume_from_checkpoint=...)`` goes on.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        *args: Any,
        settings: PacedSettings | None = None,
        embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        if settings is not None and not isinstance(settings, PacedSettings):
            raise TypeError(
                f"settings must be a PacedSettings, got {type(settings).__name__}; write PacedSettings(target=0.5, ...)"
            )
        self.settings = settings or PacedSettings()
        self._heard = Heard()
        functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        listening = [self._heard.listening(function, place) for place, function in enumerate(functions)]
        args, kwargs = with_indices(args, kwargs)
        if self.settings.loss == "tb":
            check_config(kwargs.get("args", args[0] if args else None))
        super().__init__(model, listening, *args, **kwargs)
        self._prompt_ids = self._tokenised()
        self._index_of = positions(self._prompt_ids)
        if embeddings is None:
            embeddings = prompt_embeddings(self.accelerator.unwrap_model(self.model), self._prompt_ids)
        if len(embeddings) != len(self._prompt_ids):
            raise ValueError(f"{len(self._prompt_ids)} prompts need as many embeddings, got {len(embeddings)}")
        chosen = self.settings
        generator = torch.Generator().manual_seed(self.args.seed)
        self.head = PartitionHead(
            embeddings, hidden=chosen.hidden, beta=chosen.tb_beta, start=chosen.target, generator=generator
        ).to(self.accelerator.device)
        self._head_optimizer = torch.optim.AdamW(self.head.parameters(), lr=chosen.head_learning_rate, weight_decay=0.0)
        prompts_a_batch = self.args.generation_batch_size // self.num_generations
        if chosen.selection == "paced" and prompts_a_batch > len(self._prompt_ids) // 2:
            raise ValueError(
                f"a batch of completions holds {prompts_a_batch} prompts (generation_batch_size {self.args.generation_batch_size} / num_generations"
                f" {self.num_generations}) and none comes twice running, so that the dataset needs {2 * prompts_a_batch}; it has {len(self._prompt_ids)}"
            )
        self.pacer = PacedSampler(
            self.head,
            prompts_a_batch,
            target=chosen.target,
            explore=chosen.explore,
            candidates=chosen.candidates,
            group=self.num_generations,
            repeat=self.num_iterations * self.args.steps_per_generation,
            seed=self.args.seed,
        ) if chosen.selection == "paced" else None  # fmt: skip
        self.replay = ErrorReplay(
            chosen.replay_capacity, add=chosen.replay_add, max_age=chosen.replay_max_age, correct_at=chosen.replay_correct_at, seed=self.args.seed
        ) if chosen.replay else None  # fmt: skip
        self._scored: dict[tuple[int, tuple[int, ...]], float] = {}
        self._before: dict[int, float] = {}  # estimates before they were fitted to the present batch
        self._fresh: (
            list[tuple[int, Tensor, Tensor, float]] | None
        ) = []  # rollouts that the buffer has not been offered yet
        self._numbers: dict[str, list[float]] = defaultdict(list)
        self._warned = False
        self.add_callback(Saving(self))

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _tokenised(self) -> list[list[int]]:
        prompts = list(self.train_dataset["prompt"])
        if isinstance(prompts[0], str):
            return [list(ids) for ids in self.processing_class(text=prompts)["input_ids"]]
        options: dict[str, Any] = {"chat_template": self.chat_template, **(self.chat_template_kwargs or {})}
        encoded = [
            self.processing_class.apply_chat_template(
                prompt,
                tools=getattr(self, "tools", None) or None,
                add_generation_prompt=True,
                return_dict=True,
                **options,
            )["input_ids"]
            for prompt in prompts
        ]
        return [list(ids[0]) if ids and isinstance(ids[0], list) else list(ids) for ids in encoded]

    def get_train_dataloader(self) -> DataLoader:
        """Prompts in the order of `pacer`, in TRL's pattern; TRL's own loader with ``selection="uniform"``."""
        if self.pacer is None:
            return super().get_train_dataloader()
        workers = self.args.dataloader_num_workers
        loader: DataLoader = DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size * self.args.steps_per_generation,
            sampler=self.pacer,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            drop_last=self.args.dataloader_drop_last,
        )
        return self.accelerator.prepare(loader)

    # --- rewards ------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Fit the estimate to rewards that have come in since the last call."""
        told = self._heard.take(self.reward_weights)
        if told is None:
            return
        self._scored = {}
        for key, values in told.items():
            finite = [value for value in values if value == value]
            # A verifier of chance may judge equal texts differently: their mean is what the policy can learn from.
            self._scored[key] = sum(finite) / len(finite) if finite else float("nan")
        everywhere = _gathered([(key[0], value) for key, values in told.items() for value in values])
        groups: dict[int, list[float]] = defaultdict(list)
        for index, reward in everywhere:
            groups[index].append(reward)
        size = max(map(len, groups.values()))
        rewards = torch.tensor([row + [float("nan")] * (size - len(row)) for row in groups.values()])
        ids = torch.tensor(list(groups))
        device = self.accelerator.device
        before = self.head.accuracy(ids.to(device), clip=False).cpu()
        self._before = dict(zip(groups, before.tolist(), strict=True))
        self._warn_once(rewards)
        means = rewards.nanmean(1)
        known = ~torch.isnan(means)
        if self.pacer is not None:
            self._numbers["staleness"].append(float(self.pacer.staleness(ids)))
        if bool(known.any()):
            self.head.update(self._head_optimizer, ids.to(device), rewards.to(device), steps=self.settings.head_steps)
            right = (rewards >= 1) | torch.isnan(rewards)
            wrong = (rewards <= 0) | torch.isnan(rewards)
            self._numbers["error"].append(float((means - before)[known].abs().mean()))
            self._numbers["all_right"].append(float(right.all(1)[known].float().mean()))
            self._numbers["all_wrong"].append(float(wrong.all(1)[known].float().mean()))
        self._numbers["estimate"].append(float(self.head.accuracy(clip=False).mean()))
        self._fresh = []

    def _warn_once(self, rewards: Tensor) -> None:
        told = "" if self._warned else misfit(rewards, self.settings.target)
        if told:
            self._warned = True
            warnings.warn(told, stacklevel=4)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Trajectory balance of a micro-batch and its share of replayed rollouts; TRL's loss in evaluation and with ``loss="trl"``."""
        if self.model.training:
            self._take_in()
        if self.settings.loss == "trl" or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            raise ValueError("a GRPO trainer does not return outputs")
        index, rewards = self._identified(inputs)
        mask = inputs["completion_mask"]
        mask = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logps, entropies = completion_logprobs(
            model, ids, attention, mask.shape[1], temperature=self.temperature, entropy=True
        )
        old = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps"))
        old = logps.detach() if old is None else old  # TRL leaves them out where they are those of now
        squared, info = self._balance(logps, old, rewards, index, mask)
        total, rows = squared.sum(), len(squared)
        self._note(info, logps.detach() - old, mask, entropies)
        if self.replay is not None:
            self._offer(index, inputs["completion_ids"], inputs["completion_mask"].bool(), old, rewards)
            again, n = self._replayed(model)
            total, rows = total + again, rows + n
        # Micro-batches have equally many rows, so that their means add up to the mean of the whole.
        return total / rows / self.current_gradient_accumulation_steps

    def _balance(self, logps: Tensor, old: Tensor, rewards: Tensor, index: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        with torch.no_grad():
            log_z = self.head.log_z(index)
        return tb_loss(
            logps, old.to(logps.dtype), rewards, log_z, self.settings.tb_beta, mask,
            length_normalize=self.settings.length_normalize, nonfinite="exclude", reduction="none",
        )  # fmt: skip

    def _identified(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Position in the dataset and reward of each row: TRL shuffles rows and passes on advantages alone."""
        indices, rewards = [], []
        for prompt, there, text, written in zip(
            inputs["prompt_ids"],
            inputs["prompt_mask"],
            inputs["completion_ids"],
            inputs["completion_mask"],
            strict=True,
        ):
            index = self._index_of.get(tuple(prompt[there.bool()].tolist()))
            if index is None:
                raise ValueError(
                    "a prompt of this batch is none of the dataset's as the tokenizer reads them: something changes prompts on their way (an"
                    " environment, a rollout function, images); use loss='trl' there"
                )
            indices.append(index)
            key = (index, tuple(text[written.bool()].tolist()))
            # A row whose mask TRL emptied (mask_truncated_completions) has no key, and no token to be trained on.
            if key not in self._scored and bool(written.any()):
                raise ValueError(
                    "a completion of this batch was not seen by the reward functions; use loss='trl' with this rollout function"
                )
            rewards.append(self._scored.get(key, float("nan")))
        device = inputs["prompt_ids"].device
        return torch.tensor(indices, device=device), torch.tensor(rewards, device=device)

    def _note(self, info: Any, log_ratio: Tensor, mask: Tensor, entropies: Tensor | None) -> None:
        used = info.used
        if bool(used.any()):
            # -log_ratio estimates KL(old || new) on texts of the old policy.
            drift = torch.where(mask, -log_ratio, torch.zeros_like(log_ratio)).sum(1)[used].mean()
            self._numbers["beta_kl"].append(self.settings.tb_beta * float(drift))
        self._numbers["left_out"].append(1 - float(used.float().mean()))
        if entropies is not None and bool(mask.any()):
            self._numbers["entropy"].append(float(entropies.detach()[mask].mean()))

    # --- replay -------------------------------------------------------------------------------------------------------

    def _offer(self, index: Tensor, tokens: Tensor, written: Tensor, old: Tensor, rewards: Tensor) -> None:
        """Collect the rollouts of a batch on its first pass, and offer them to the buffer when it is complete."""
        assert self.replay is not None
        if self._fresh is None:
            return
        for row in range(len(index)):
            self._fresh.append(
                (
                    int(index[row]),
                    tokens[row][written[row]].cpu(),
                    old[row][written[row]].detach().cpu(),
                    float(rewards[row]),
                )
            )
        if len(self._fresh) < self.args.per_device_train_batch_size * self.args.steps_per_generation:
            return
        groups: dict[int, list[tuple[int, Tensor, Tensor, float]]] = defaultdict(list)
        for each in self._fresh:
            groups[each[0]].append(each)
        size = max(map(len, groups.values()))
        nan = float("nan")
        self.replay.add(
            torch.tensor(list(groups)),
            [[tokens for _, tokens, _, _ in group] for group in groups.values()],
            [[logps for _, _, logps, _ in group] for group in groups.values()],
            torch.tensor([[each[3] for each in group] + [nan] * (size - len(group)) for group in groups.values()]),
            torch.tensor([self._before[index] for index in groups]),
            step=int(self.head.updates),
        )
        self._fresh = None  # until the next batch

    def _replayed(self, model: Any) -> tuple[Tensor | float, int]:
        """Summed squares of rollouts from the buffer, older than the batch at hand, and how many they are."""
        assert self.replay is not None
        batch = self.replay.sample(self.settings.replay, before=int(self.head.updates))
        self._numbers["replayed"].append(float(len(batch)))
        if not len(batch):
            return 0.0, 0
        device = self.accelerator.device
        prompts = [torch.tensor(self._prompt_ids[int(index)]) for index in batch.prompt_ids]
        width = max(map(len, prompts))
        left = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in prompts])
        there = torch.stack([torch.arange(width) >= width - len(row) for row in prompts])
        ids, mask = torch.cat([left, batch.tokens], 1).to(device), batch.mask.to(device)
        attention = torch.cat([there, batch.mask], 1).long().to(device)
        logps, _ = completion_logprobs(model, ids, attention, mask.shape[1], temperature=self.temperature)
        squared, _ = self._balance(
            logps, batch.old_logps.to(device), batch.rewards.to(device), batch.prompt_ids.to(device), mask
        )
        self._numbers["replay_age"].append(float((int(self.head.updates) - batch.steps).float().mean()))
        return squared.sum(), len(batch)

    # --- log and state ------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's log, with the means of what was noted since the last one."""
        if self.model.training:
            for name, values in self._numbers.items():
                logs = {**logs, ("entropy" if name == "entropy" else f"paced/{name}"): sum(values) / len(values)}
            self._numbers.clear()
        super().log(logs, *args, **kwargs)

    def paced_state(self) -> dict[str, Any]:
        """Head, its optimizer, sampler and buffer: tensors, numbers and lists alone."""
        state = {"head": self.head.state_dict(), "optimizer": self._head_optimizer.state_dict()}
        if self.pacer is not None:
            state["pacer"] = self.pacer.state_dict()
        if self.replay is not None:
            state["replay"] = self.replay.state_dict()
        return state

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As of `transformers.Trainer`; from a checkpoint it takes up estimate, sampler and buffer too."""
        folder = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        if folder:
            self._take_up(os.path.join(folder, STATE))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _take_up(self, path: str) -> None:
        if not os.path.exists(path):
            warnings.warn(f"{path} is missing: the estimate of difficulty starts afresh", stacklevel=3)
            return
        state = read_state(path, self.accelerator.device)
        try:
            self.head.load_state_dict(state["head"])
            self._head_optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is of another head: resume with the settings and embeddings of the run that wrote it, or remove the file to start the"
                f" estimate afresh ({str(error).splitlines()[0]})"
            ) from None
        if self.pacer is not None and "pacer" in state:
            # The trainer walks over the epoch's batches again unless the epoch was complete, or it was told not to.
            walks = not state["epoch_complete"] and not self.args.ignore_data_skip
            self.pacer.load_state_dict(state["pacer"], from_start=walks)
        if self.replay is not None and "replay" in state:
            self.replay.load_state_dict(state["replay"])


def _gathered(values: list[Any]) -> list[Any]:
    from accelerate.utils import gather_object

    return gather_object(values)
