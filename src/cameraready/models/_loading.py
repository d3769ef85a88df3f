"""What transformers does with a folder or hub id, and its failures as sentences."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cameraready.models import ModelError

if TYPE_CHECKING:
    import torch

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
#: Buffers of older releases of transformers (causal masks, rotary frequencies) that no model reads any more.
_OLD_BUFFERS = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq|position_ids)$")
_COMMIT = re.compile(r"[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]")


def looks_like_an_id(text: str, *, owner: bool = True) -> bool:
    """Whether `text` is written like OWNER/NAME, or like NAME where no owner is asked for."""
    return _ID.fullmatch(text) is not None and ("/" in text or not owner)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' progress bars where nobody watches: standard error is not a terminal."""
    if sys.stderr.isatty():
        yield
        return
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF loader's bar cannot be turned off
            yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def needs_extra() -> None:
    """Raise a ModelError, one line, where PyTorch or transformers is not installed."""
    from importlib.util import find_spec

    missing = [module for module in ("torch", "transformers") if find_spec(module) is None]
    if missing:
        raise ModelError(f'Language models need {" and ".join(missing)}: pip install "cameraready[lm]"')


def hub_options(revision: str | None = None) -> dict[str, Any]:
    """What every question to the hub is asked with: the revision, and without a network only what is on this machine.

    The hub's client tries a name that does not resolve for half a minute, file by file.
    """
    options: dict[str, Any] = {"revision": revision} if revision else {}
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or "huggingface.co"
    if not any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            options["local_files_only"] = True
    return options


def n_embeddings(model: Any) -> int:
    """Tokens that a model has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def long() -> torch.dtype:
    """The dtype of token ids."""
    import torch

    return torch.long


def dtype_of(dtype: Any) -> torch.dtype | None:
    """A floating-point torch.dtype by name or value; None stays None."""
    import torch

    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ModelError(f"dtype={dtype!r} cannot hold a model's weights; use float32, bfloat16, float16 or float64.")
    return found


def device_of(device: Any) -> torch.device:
    """A device that is there."""
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ModelError(f"device={device!r} is none that PyTorch knows; use cpu, cuda, cuda:1 or mps.") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device={device!r} was asked for, and PyTorch sees no CUDA device on this machine; use cpu.")
    if found.type == "cuda" and found.index is not None and found.index >= torch.cuda.device_count():
        raise ModelError(f"device={device!r} was asked for, and there are {torch.cuda.device_count()} CUDA devices.")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device='mps' was asked for, and PyTorch cannot use Metal on this machine; use cpu.")
    if found.type == "meta":
        raise ModelError(
            "device='meta' holds no weights, so nothing could be asked of the model; use cpu, cuda or mps."
        )
    try:
        torch.empty(1, device=found)
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
        ImportError,
        AttributeError,
    ):  # each with its own complaint
        raise ModelError(
            f"device={device!r} was asked for, and this PyTorch cannot use it on this machine; use cpu."
        ) from None
    return found


def context_of(config: Any) -> int | None:
    """Longest input in tokens by a configuration."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(found := getattr(config.get_text_config(), name, None), int):
            return found
    return None


def check_folder(folder: Path) -> None:
    """Raise a ModelError unless `folder` holds a configuration and safetensors."""
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        if "adapter_config.json" in names:
            raise ModelError(
                f"{folder} holds an adapter, not a model; merge it into its base first (PEFT's merge_and_unload), and save that."
            )
        if ggufs := sorted(name for name in names if name.endswith(".gguf")):
            raise ModelError(f"{folder} has no config.json; it holds GGUF files, name one: {folder / ggufs[0]}.")
        raise ModelError(
            f"{folder} has no config.json; a model's folder holds config.json, a tokenizer and safetensors."
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(
            f"{folder / 'config.json'} does not say its model_type; it is no configuration of transformers."
        )
    if not any(name.endswith(".safetensors") for name in names):
        pickles = sorted(name for name in names if name.endswith(_PICKLES))
        if pickles:
            raise ModelError(
                f"{folder} holds its weights as pickles only ({pickles[0]}), which can run code when they are read and are "
                "refused; save the model with safetensors: model.save_pretrained(FOLDER)."
            )
        raise ModelError(f"{folder} holds no weights; model*.safetensors are expected beside its config.json.")
    _check_index(folder, names)


def _check_index(folder: Path, names: set[str]) -> None:
    """Raise a ModelError where weights come in several files and the list that joins them is missing or broken."""
    index = folder / "model.safetensors.index.json"
    if index.name in names and "model.safetensors" not in names:
        try:
            listed = json.loads(index.read_text())["weight_map"]
            sound = bool(listed) and all(isinstance(file, str) for file in listed.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise ModelError(f"{index} is damaged: it does not say which file holds which weight. Get it again.")
    elif "model.safetensors" not in names and any(_SHARD.fullmatch(name) for name in names):
        raise ModelError(
            f"{folder} holds weights in several files, and {index.name}, which joins them, is missing. Get it too."
        )


def commit_of(identifier: str, name: str, revision: str | None) -> str | None:
    """The commit that a branch or tag of a hub id stands for now; None where the hub's client does not tell."""
    from transformers.utils import cached_file

    try:
        path = cached_file(identifier, "config.json", **hub_options(revision))
    except Exception as error:
        raise explained(error, name) from error
    found = _COMMIT.search(str(path))
    return None if found is None else found.group(1)


def load(
    where: str, name: str, device: torch.device, dtype: torch.dtype | None, revision: str | None
) -> tuple[Any, Any]:
    """Model, in evaluation mode on `device`, and tokenizer of a folder or hub id."""
    import torch
    import transformers

    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    options = {} if Path(where).is_dir() else hub_options(revision)
    loader: Any = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **options)
        model, loading = loader.from_pretrained(
            where,
            config=config,
            dtype=dtype if dtype is not None else "auto",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            adapter_kwargs={key: value for key, value in options.items() if key == "local_files_only"},
            **options,
        )
    except Exception as error:
        raise explained(error, name) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    except Exception as error:
        raise explained(error, f"the tokenizer of {name}") from error
    missing = sorted(loading.get("missing_keys", ()))
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} of the weights that its configuration asks for, among them {missing[0]}; it would be "
            "filled with random numbers. Is it a part of a model, or of another architecture?"
        )
    check_unused(loading, name)
    check_vocabulary(model, tokenizer, name)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    model = model.eval().to(device)
    check_finite(model, name)
    return model, tokenizer


def check_unused(loading: dict[str, Any], name: str) -> None:
    """Raise a ModelError if a checkpoint holds weights that the model has no place for.

    Those that transformers itself knows to be left out (towers for images, heads that predict several tokens) are not in its
    list; buffers of older releases are let pass here.
    """
    unused = sorted(key for key in loading.get("unexpected_keys", ()) if _OLD_BUFFERS.search(key) is None)
    if unused:
        raise ModelError(
            f"{name} holds {len(unused)} weights that the model of its configuration has no place for, among them {unused[0]}; "
            "without them it would compute something else. Does config.json belong to these weights (model_type, number of "
            "layers, biases)?"
        )


def check_finite(model: Any, name: str) -> None:
    """Raise a ModelError if weights are not finite numbers."""
    wrong = []
    for label, weight in model.named_parameters():
        if weight.is_floating_point() and weight.itemsize > 1 and weight.numel():
            least, most = weight.detach().aminmax()  # a NaN gives NaN; nothing of the weight's size is allocated
            if not bool(least.isfinite() & most.isfinite()):
                wrong.append(label)
    if wrong:
        raise ModelError(
            f"{name} holds weights that are not finite numbers ({len(wrong)} of its tensors, among them {wrong[0]}); it is damaged, "
            "its training diverged, or they do not fit into the dtype asked for."
        )


def check_vocabulary(model: Any, tokenizer: Any, name: str) -> None:
    """Raise a ModelError if the tokenizer writes tokens that the embedding has no row for.

    Special tokens beyond it are let pass: some checkpoints carry those of a sibling that sees images.
    """
    rows = n_embeddings(model)
    special = set(tokenizer.all_special_ids) | {
        i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special
    }
    beyond = [i for i in tokenizer.get_vocab().values() if i >= rows and i not in special]
    if beyond:
        raise ModelError(
            f"The tokenizer of {name} writes tokens up to {max(beyond)}, and the model has embeddings for {rows}: they do not "
            "belong together. After adding tokens call model.resize_token_embeddings(len(tokenizer)) and save both."
        )


def explained(error: Exception, name: str) -> ModelError:
    """The sentence for a failure of transformers or of the hub."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    text = " ".join(str(link) for link in chain)
    if isinstance(error, ModelError):
        return error
    first = " ".join(str(error).split())[:300]
    if "GatedRepoError" in kinds:
        return ModelError(
            f"{name} is gated: accept its terms on its page of the hub, then say who you are with `hf auth login` or HF_TOKEN."
        )
    if "RevisionNotFoundError" in kinds or "is not a valid git identifier" in text:
        return ModelError(
            f"{name} has no such revision; leave it out for the newest, or see the repository's page for its tags."
        )
    if "RepositoryNotFoundError" in kinds or "is not a valid model identifier" in text:
        return ModelError(
            f"The hub has no model {name}, or it is private: check the spelling, or log in with `hf auth login`."
        )
    if kinds & {
        "ConnectionError",
        "ConnectError",
        "ConnectTimeout",
        "ReadTimeout",
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "ProxyError",
    } or ("couldn't connect to" in text or "offline mode" in text):
        return ModelError(
            f"{name} is not on this machine and the Hugging Face hub cannot be reached (or HF_HUB_OFFLINE is set). Get it where there "
            f"is a network (hf download {name.removeprefix('hf:').partition('@')[0]}) and name its folder, or use a .gguf file."
        )
    if "trust_remote_code" in text:
        return ModelError(
            f"{name} needs code that comes with the checkpoint, which is never run; use a model that transformers has."
        )
    if "SafetensorError" in kinds:
        return ModelError(f"A safetensors file of {name} is truncated or damaged ({first}); get it again.")
    if "ignore_mismatched_sizes" in text:
        return ModelError(
            f"The weights of {name} are of other shapes than its configuration says; they do not belong together."
        )
    if isinstance(error, FileNotFoundError) and ".safetensors" in text:
        return ModelError(f"{name} lacks a part of its weights: {first}. Get it again.")
    if "safetensors" in text and ("does not appear to have" in text or "no file named" in text.lower()):
        return ModelError(
            f"{name} has no safetensors, or not all of its parts; weights as pickles can run code when they are read and are refused."
        )
    if isinstance(error, AssertionError) and "adding_idx" in text:
        return ModelError(
            f"The configuration of {name} names a padding token beyond its vocab_size; it does not belong to these weights."
        )
    if "Unrecognized configuration class" in text:
        return ModelError(f"{name} is no causal language model: transformers has no AutoModelForCausalLM for it.")
    if "does not recognize this architecture" in text:
        return ModelError(
            f"{name} is of an architecture that the installed transformers does not know; upgrade transformers."
        )
    if isinstance(error, ImportError):
        return ModelError(f"{name} needs a package that is not installed: {first}")
    return ModelError(f"{name} could not be opened: {type(error).__name__}: {first}")
