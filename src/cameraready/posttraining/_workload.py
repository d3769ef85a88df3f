"""What the room's studies are tried on: an exact testbed, or a language model with problems that a program can check.

A study names `open_posttraining` as its ``open`` (with its own shipped names bound) and accepts the kinds in `ACCEPTS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cameraready.amounts import memory, weights
from cameraready.lm._workload import GYM, LM_EVAL, REASONING, RETRIEVAL, TINY, LMWorkload, shipped_names, tiny

if TYPE_CHECKING:
    from cameraready.evidence import Cost, Spec
    from cameraready.lm._problems import Problem
    from cameraready.models import LanguageModel

#: Kinds of spec that `open_posttraining` takes beside shipped names.
ACCEPTS = ("hf", "checkpoint", "object", "value")
#: What is trained on where the user named neither tasks nor prompts.
DEFAULT_TASKS = ("arithmetic",)
_WANTED = (
    "an EnumerableTask (a world whose answers can all be listed; cameraready.posttraining.enumerable_task makes one of a function), or a "
    "language model as (model, tokenizer)"
)


def open_posttraining(spec: Spec, shipped: Sequence[str] | Mapping[str, Callable[[], Any]] = ()) -> Any:
    """The workload that `spec` names. Names, prompts and tasks are checked here; a model is opened when it is first asked for.

    Parameters
    ----------
    spec : Spec
    shipped : sequence of str, or mapping of str to callable
        Names of the study's own workloads. With a mapping a name opens as what its callable returns, else as itself.

    Returns
    -------
    str, EnumerableTask or PosttrainingWorkload
        A shipped name (or what it stands for), the user's own enumerable task as it is, or a language model with its problems.

    Raises
    ------
    SpecError
        An unknown name or task, prompts without answers, an object that is neither task nor model.
    """
    from cameraready.evidence import SpecError

    if spec.kind == "shipped":
        if spec.name in shipped:
            return shipped[spec.name]() if isinstance(shipped, Mapping) else spec.name
        known = (*shipped, *shipped_names())
        if spec.name not in known:
            near = difflib.get_close_matches(spec.name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise SpecError(f"there is no workload {spec.name!r}; {hint}")
    if spec.kind == "object":
        spec = _imported(spec)
    if spec.kind == "value" and is_enumerable(spec.value):
        for option in ("data", "tasks"):
            if option in spec.options:
                raise SpecError(f"--{option} goes with a language model; an EnumerableTask brings its own problems")
        return spec.value
    return PosttrainingWorkload(spec)


def is_enumerable(value: Any) -> bool:
    """Whether `value` is an `EnumerableTask`, by what it has: all completions, their lengths, which are right, features."""
    return all(hasattr(value, name) for name in ("tokens", "lengths", "correct", "features"))


class PosttrainingWorkload(LMWorkload):
    """A language model to be trained, with problems whose answers a program can check.

    Attributes
    ----------
    name, is_tiny, prompts
        As of `cameraready.lm._workload.LMWorkload`.
    tasks : tuple of str
        What is trained on, at least one: what ``--tasks`` named, else ``("own",)`` where there are prompts, else `DEFAULT_TASKS`.
    """

    def __init__(self, spec: Spec) -> None:
        from cameraready.evidence import SpecError

        if spec.kind == "value" and not (isinstance(spec.value, tuple) or hasattr(spec.value, "tokenizer")):
            raise SpecError(f"give {_WANTED}, not {type(spec.value).__name__}")
        super().__init__(spec)
        for task in self.tasks:
            check_trainable(task)
        if self.prompts is not None:
            lacking = next((i for i, (_, answer) in enumerate(self.prompts, 1) if answer is None), None)
            if lacking is not None:
                raise SpecError(
                    f"prompt {lacking} has no answer, and a reward is a check of the answer: name both columns (--data prompts.jsonl:prompt,answer)"
                )
        elif "own" in self.tasks:
            raise SpecError("the task 'own' is your prompts; give them with --data prompts.jsonl:prompt,answer")
        if not self.tasks:
            self.tasks = DEFAULT_TASKS if self.prompts is None else ("own",)

    def __repr__(self) -> str:
        return f"PosttrainingWorkload({self.name!r})"

    def split(self, lm: LanguageModel, *, train: int, test: int, seed: int = 0) -> tuple[list[Problem], list[Problem]]:
        """Problems to train on and problems to judge by, no prompt in both, drawn from all of `tasks` in equal shares.

        Parameters
        ----------
        lm : LanguageModel
            Its chat template, where it has one, is put around each prompt.
        train, test : int
            How many of each; at least 1 and 0. Training problems are mixed, so that any stretch of them holds all tasks.
        seed : int
            Another seed draws other problems of the generated tasks and divides the user's prompts otherwise.

        Raises
        ------
        ValueError
            There are too few different problems; the message says how many there are.
        """
        if train < 1 or test < 0:
            raise ValueError(f"train must be at least 1 and test at least 0, got {train} and {test}")
        drawn = []
        for place, task in enumerate(self.tasks):
            shares = _share(train, place, len(self.tasks)), _share(test, place, len(self.tasks))
            drawn.append(self._split_task(task, lm, *shares, seed))
        return _interleaved([problems for problems, _ in drawn]), _interleaved([problems for _, problems in drawn])

    def _split_task(
        self, task: str, lm: LanguageModel, train: int, test: int, seed: int
    ) -> tuple[list[Problem], list[Problem]]:
        wanted = train + test
        if wanted == 0:
            return [], []
        own = task == "own"
        n = len(self.prompts or ()) if own else wanted
        if own:
            self._check_answers()
        while True:
            different = list({problem.prompt: problem for problem in self.problems(task, lm, n=n, seed=seed)}.values())
            if len(different) >= wanted or own or n >= 8 * wanted:
                break
            n *= 2  # small worlds repeat themselves
        if len(different) < wanted:
            raise ValueError(f"{task} has {len(different)} different problems, and {train} + {test} were asked for")
        order = np.random.default_rng([seed, 81]).permutation(len(different)) if own else range(len(different))
        chosen = [different[int(place)] for place in order][:wanted]
        return chosen[test:], chosen[:test]

    def _check_answers(self) -> None:
        """Raises ValueError for a prompt that stands in the data with two answers, so that it is not known what is right."""
        known: dict[str, str | None] = {}
        for prompt, answer in ((each[0], each[1]) for each in self.prompts or ()):
            if known.setdefault(prompt, answer) != answer:
                raise ValueError(
                    f"the prompt {prompt[:60]!r} stands in the data with two answers, {known[prompt]!r} and {answer!r}; keep one of them"
                )


def cost(
    spec: Spec,
    *,
    steps: int,
    prompts: int = 4,
    group: int = 8,
    prompt_tokens: int = 64,
    new_tokens: int = 64,
    iterations: int = 1,
    lora_rank: int = 0,
    reference: bool = False,
    micro_batch: int | None = None,
    checkpointing: bool = False,
    runs: int = 1,
    device: str = "cpu",
    dtype: str | None = None,
) -> Cost:
    """What training a model by `cameraready.posttraining._runs.grpo_run` would take, told from its configuration: for a study's ``cost``.

    Parameters
    ----------
    spec : Spec
        As for `open_posttraining`.
    steps : int
        Optimizer steps of one run.
    prompts, group : int
        Prompts of a step, and completions of each.
    prompt_tokens, new_tokens : int
        Of each prompt and each completion; a completion that ends early costs less.
    iterations : int
        Optimizer steps on each batch of completions.
    lora_rank : int
        Of adapters on all linear layers but the head; 0 trains every weight.
    reference : bool
        Whether the model as it was given is asked too (``beta`` above 0), which costs a pass and no memory.
    micro_batch : int, optional
        Completions of one backward pass; all of a step by default.
    checkpointing : bool
        Whether activations are computed again in the backward pass.
    runs : int
        Runs in all, one after the other.
    device, dtype : str
        As of `cameraready.models.open_model`.

    Returns
    -------
    Cost
        Of an enumerable task only the memory: what one is made of is not known before it is opened.

    Raises
    ------
    ModelError
        The configuration cannot be had, or a number is out of range.
    """
    from cameraready.evidence import Cost
    from cameraready.models import ModelError
    from cameraready.models.cost import GIB, cache_bytes, config_of, cost_of

    numbers = {
        "steps": steps,
        "prompts": prompts,
        "group": group,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
    }
    numbers |= {"iterations": iterations, "runs": runs, "micro_batch": micro_batch or 1, "lora_rank": lora_rank}
    for label, number in numbers.items():
        least = 0 if label == "lora_rank" else 1
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ModelError(f"{label}={number!r} must be a whole number, at least {least}.")
    workload = open_posttraining(spec)
    if not isinstance(workload, PosttrainingWorkload):
        return Cost(
            None, 1.0, (), ("an enumerable task is held in memory whole; its hours are not known before it is opened",)
        )
    name: Any = workload.reference or (
        tiny(TINY[workload.name]).model.config if workload.is_tiny else workload.spec.value
    )
    batch, tokens = prompts * group, prompt_tokens + new_tokens
    common: dict[str, Any] = {"batch": batch, "device": device, "dtype": dtype or None}
    batches = -(-steps // iterations)
    generating = cost_of(name, prompt_tokens=prompt_tokens, new_tokens=new_tokens, passes=runs * batches, **common)
    forward = cost_of(name, prompt_tokens=tokens, passes=runs * steps, **common)
    # Backward is a forward pass to the inputs of each layer, and one more to its weights where they are trained.
    passes = (2 if lora_rank else 3) + checkpointing + ((iterations > 1) + reference) * batches / steps
    config = config_of(name)
    width = round(generating.weights_gib * GIB / generating.parameters)
    micro = min(micro_batch or batch, batch)
    text, layers = config.get_text_config(), linear_shapes(config)
    inside_blocks = sum(a + b for a, b in layers)
    adapters = lora_rank * inside_blocks
    # Weights, gradients and two moments of AdamW in float32, of all weights (the model that was given stays beside) or of adapters.
    training = 16 * (adapters if lora_rank else generating.parameters)
    if checkpointing:  # each block keeps what it was given, and one at a time its inside
        kept = text.num_hidden_layers * text.hidden_size + inside_blocks / text.num_hidden_layers
    else:
        kept = inside_blocks
    inside = micro * width * (tokens * kept + 3 * new_tokens * text.vocab_size)
    cache = cache_bytes(config, tokens=tokens, batch=batch, width=width)
    needed = generating.weights_gib + (training + max(inside, cache)) / GIB
    trained = (
        f"adapters of rank {lora_rank} on all linear layers but the head ({weights(adapters)} weights)"
        if lora_rank
        else f"all {weights(generating.parameters)} weights"
    )
    notes = (
        generating.notes[0],
        f"training {trained} by AdamW: {steps} steps of {prompts} prompts with {group} completions of {new_tokens} tokens"
        + (f", {runs} runs" if runs > 1 else ""),
        f"memory of the model, {memory(training)} of trained weights, gradients and optimizer states, and the activations of "
        f"{micro} completions at a time with their logits (an estimate)",
    )
    return Cost(generating.hours + passes * forward.hours, needed, generating.downloads, notes)


def linear_shapes(config: Any) -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer of a configuration's model, the head left out: what adapters are put on.

    A layer of experts stacked in one tensor has no linear layer of its own and is left out, as PEFT's ``"all-linear"`` does.
    """
    import torch
    import transformers
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    found = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            found.append((module.in_features, module.out_features))
        elif isinstance(module, Conv1D):
            found.append((int(module.weight.shape[0]), int(module.weight.shape[1])))
    return found


def check_trainable(task: str) -> None:
    """Raise a SpecError for a task without a verifier that could be asked during training.

    Raises
    ------
    SpecError
    """
    from cameraready.evidence import SpecError

    if task.startswith(LM_EVAL) or task in RETRIEVAL:
        reason = "is an evaluation" if task.startswith(LM_EVAL) else "needs prompts of a fixed length"
        raise SpecError(f"{task} {reason}; to train on there are {', '.join(REASONING)}, {GYM}NAME and own")
    if task.startswith(GYM):
        _check_gym(task.removeprefix(GYM))


def _check_gym(name: str) -> None:
    from cameraready.evidence import SpecError

    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "reasoning_gym":
            raise
        raise SpecError('tasks of reasoning-gym need it: pip install "cameraready[lm-tasks]"') from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        raise SpecError(
            f"reasoning-gym has no data set {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
        )


def _imported(spec: Spec) -> Spec:
    """The object that ``package.module:object`` names, as a value; a function is called without arguments."""
    from dataclasses import replace

    from cameraready.evidence import SpecError
    from cameraready.evidence.specs import load_object

    found = load_object(spec.name)
    if callable(found) and not is_enumerable(found) and not hasattr(found, "tokenizer"):
        try:
            found = found()
        except Exception as error:  # the user's code, whatever it does
            raise SpecError(f"{spec.name}() raised {type(error).__name__}: {error}") from error
    if not (is_enumerable(found) or isinstance(found, tuple) or hasattr(found, "tokenizer")):
        raise SpecError(f"{spec.name} is {type(found).__name__}; expected {_WANTED}, or a function that returns one")
    return replace(spec, kind="value", value=found)


def _share(total: int, place: int, parts: int) -> int:
    return total // parts + (place < total % parts)


def _interleaved(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """One of each in turn, as long as there are any."""
    longest = max(map(len, lists), default=0)
    return [each[place] for place in range(longest) for each in lists if place < len(each)]
