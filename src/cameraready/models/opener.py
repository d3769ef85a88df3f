"""Open a language model by name: a hub id, a local folder, a GGUF, a packaged model, or one that is already open."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cameraready.models import ModelError, _cache, _loading, gguf, packaged

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Source = Literal["hf", "folder", "gguf", "packaged", "value"]

#: Models that `opened` keeps at most, and the share of this machine's memory that all of them may take.
_MOST_KEPT, _KEPT_SHARE = 3, 0.25


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model with its tokenizer, ready to be asked.

    Attributes
    ----------
    model : PreTrainedModel
        In evaluation mode.
    tokenizer : PreTrainedTokenizerBase
    name : str
        As it was asked for; of a model given as a value its configuration's name or its class.
    source : {"hf", "folder", "gguf", "packaged", "value"}
        Where it came from.
    folder : Path or None
        Of its files on this machine; None for a hub id and a value.
    revision : str or None
        The commit of a hub id, 40 hexadecimal digits, also where a branch or tag was asked for; None where it is not known.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: Source
    folder: Path | None = None
    revision: str | None = None
    known_digest: str | None = field(default=None, repr=False)

    @cached_property
    def digest(self) -> str:
        """What tells this model from another: 64 hexadecimal digits, worked out when first asked for.

        The SHA-256 of a GGUF, of a folder's configuration, tokenizer and weight files, of a hub id with its commit (never
        with a branch or tag, which move), or of the named weights of a model given as a value.
        """
        if self.known_digest is not None:
            return self.known_digest
        if self.folder is not None:
            return _cache.digest_of_folder(self.folder)
        return _cache.digest_of_weights(self.model)

    @property
    def device(self) -> torch.device:
        """Where its first parameter lies."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of its first floating-point parameter."""
        return next(p.dtype for p in self.model.parameters() if p.dtype.is_floating_point)

    @property
    def pad_id(self) -> int:
        """The token to pad a batch with: the tokenizer's, else its end-of-text token, else 0.

        Padded places must be masked; the number only has to be one the embedding knows.
        """
        tokenizer = self.tokenizer
        found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return 0 if found is None else int(found)

    @property
    def context(self) -> int | None:
        """The longest input in tokens that the model was made for, where its configuration says so."""
        return _loading.context_of(self.model.config)

    def encode(self, text: str) -> torch.Tensor:
        """The tokens of `text` as the model expects them, on its device.

        Special tokens are those the tokenizer adds by itself; where the text already begins with the beginning-of-text
        token, as chat templates write it, it is not put in front a second time. A tokenizer without such a token adds none.

        Returns
        -------
        torch.LongTensor
            Shape (1, T), T >= 1.

        Raises
        ------
        ModelError
            If the text has no token at all (an empty text, for a model without a beginning-of-text token), or one that
            the embedding does not know.
        """
        if not isinstance(text, str):
            raise TypeError(f"A text was expected, not {type(text).__name__}.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ModelError(
                "The text holds half of a surrogate pair, which no tokenizer can read; decode it anew."
            ) from None
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        begin = self.tokenizer.bos_token_id
        if ids.shape[1] > 1 and begin is not None and int(ids[0, 0]) == int(ids[0, 1]) == begin:
            ids = ids[:, 1:]
        if ids.shape[1] == 0:
            raise ModelError(
                f"An empty text has no tokens for {self.name}: it has no beginning-of-text token. Give at least one character."
            )
        rows = _loading.n_embeddings(self.model)
        if int(ids.max()) >= rows:
            unknown = self.tokenizer.convert_ids_to_tokens(int(ids.max()))
            raise ModelError(
                f"The tokenizer writes {unknown!r} as token {int(ids.max())}, and {self.name} has embeddings for {rows} tokens; "
                "leave it out of the text."
            )
        return ids.to(device=self.device, dtype=_loading.long())

    def prompt(self, text: str) -> str:
        """`text` as one turn of a user, up to where the model answers; as it is for a model without a chat template."""
        if not self.tokenizer.chat_template:
            return text
        turn = [{"role": "user", "content": text}]
        try:
            return str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # the template is a program of the model's author, in Jinja
            raise ModelError(f"The chat template of {self.name} failed on a plain question: {error}") from error


def open_model(
    name: str | os.PathLike[str] | tuple[Any, Any] | LanguageModel,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
) -> LanguageModel:
    """Open a causal language model with its tokenizer.

    Parameters
    ----------
    name : str, path, or (model, tokenizer)
        ``"hf:OWNER/NAME"``, ``"hf:OWNER/NAME@REVISION"`` or a bare ``"OWNER/NAME"`` of the Hugging Face hub; a folder with
        ``config.json``, a tokenizer and safetensors; a ``.gguf`` file, converted once; the name of a packaged model
        (`cameraready.models.packaged`); or a pair that is already open. An existing folder goes before a hub id of the
        same name. An adapter (``adapter_config.json``) that lies in a model's folder is loaded with it.
    device : str or torch.device
        Where the weights go. A pair stays where it is, whatever is said here.
    dtype : str or torch.dtype, optional
        ``"float32"``, ``torch.bfloat16`` ...; by default float32 on a CPU and the checkpoint's own elsewhere. A pair keeps
        its own; asking for another is an error.
    revision : str, optional
        Branch, tag or commit of a hub id.

    Returns
    -------
    LanguageModel
        In evaluation mode. Code that comes with a checkpoint is never run, and pickled weights are never read. A tokenizer
        without a padding token gets its end-of-text token for one (a pair's tokenizer is left alone: use
        `LanguageModel.pad_id`); without an end-of-text token generation ends at its budget of tokens.

    Raises
    ------
    ModelError
        A sentence that says what to do: an unknown name, a hub that cannot be reached, a gated or unknown id, a folder of
        pickles, a truncated GGUF, weights that are missing, left over or not finite, or special tokens that do not fit
        together, an impossible device or dtype.

    Notes
    -----
    To open the same name many times in a process use `opened`, which keeps it.
    """
    _loading.needs_extra()
    if isinstance(name, LanguageModel):
        name = (name.model, name.tokenizer)
    if isinstance(name, tuple):
        return _given(name, dtype)
    if not isinstance(name, str | os.PathLike):
        raise TypeError(
            f"A model is named by a text or path, or given as (model, tokenizer); {type(name).__name__} is neither."
        )
    text = os.fspath(name)
    if not text.strip():
        raise ModelError("The name of a model is empty; give a hub id (hf:OWNER/NAME), a folder or a .gguf file.")
    device, dtype = _loading.device_of(device), _loading.dtype_of(dtype)
    if text.startswith("hf:"):
        return _from_hub(text[3:], text, device, dtype, revision)
    if text in packaged.MODELS:
        folder = packaged.folder_of(text)
        return _from_folder(folder, text, "packaged", device, dtype, packaged.MODELS[text].sha256)
    path = Path(text).expanduser()
    if os.path.isdir(path):  # false, and no error, of a name that no file can have
        return _from_folder(path, text, "folder", device, dtype, None)
    if os.path.isfile(path) or (text.endswith(".gguf") and len(path.name) < 256):
        folder, digest = gguf.converted(path)
        return _from_folder(folder, text, "gguf", device, dtype, digest)
    if _loading.looks_like_an_id(text.partition("@")[0]):
        return _from_hub(text, text, device, dtype, revision)
    raise ModelError(
        f"There is no model {text if len(text) < 200 else text[:200] + '...'!r}: no folder and no .gguf file of that name, no packaged model "
        f"({', '.join(packaged.MODELS)}), and it is no hub id (hf:OWNER/NAME)."
    )


def opened(name: str | os.PathLike[str], device: str = "cpu", dtype: str | None = None) -> LanguageModel:
    """`open_model`, kept in this process: the second call with the same arguments costs nothing.

    At most three are kept, and no more than a quarter of this machine's memory; the longest unused goes first. Callers
    share the model: whoever changes weights, configuration or mode works on a ``copy.deepcopy``.
    """
    key = (os.fspath(name), str(device), None if dtype is None else str(dtype))
    if key in _KEPT:
        _KEPT.move_to_end(key)
        return _KEPT[key]
    room = _KEPT_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    while _KEPT and (len(_KEPT) >= _MOST_KEPT or sum(map(_bytes_of, _KEPT.values())) > room):
        _KEPT.popitem(last=False)
    found = _KEPT[key] = open_model(name, device=device, dtype=dtype)
    while len(_KEPT) > 1 and sum(map(_bytes_of, _KEPT.values())) > room:
        _KEPT.popitem(last=False)
    return found


_KEPT: OrderedDict[tuple[str, str, str | None], LanguageModel] = OrderedDict()


def forget() -> None:
    """Let go of every model that `opened` keeps."""
    _KEPT.clear()


def _given(pair: tuple[Any, Any], dtype: Any) -> LanguageModel:
    if len(pair) != 2:
        raise ModelError(f"A model given as a value is a pair (model, tokenizer); this tuple has {len(pair)} items.")
    model, tokenizer = pair
    if isinstance(model, str) or not hasattr(model, "get_input_embeddings") or not callable(tokenizer):
        raise ModelError(
            "A model given as a value is a pair (model, tokenizer) of transformers; this one holds "
            f"{type(model).__name__} and {type(tokenizer).__name__}."
        )
    wanted = _loading.dtype_of(dtype)
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    found = LanguageModel(model.eval(), tokenizer, name, "value")
    if wanted is not None and wanted != found.dtype:
        raise ModelError(
            f"The model given is in {found.dtype} and {wanted} was asked for; convert it yourself (model.to({wanted})), or leave "
            "dtype out."
        )
    _loading.check_vocabulary(model, tokenizer, name)
    return found


def _from_folder(
    folder: Path, name: str, source: Source, device: torch.device, dtype: torch.dtype | None, digest: str | None
) -> LanguageModel:
    _loading.check_folder(folder)
    with _loading.quietly():
        model, tokenizer = _loading.load(str(folder), name, device, dtype, None)
    return LanguageModel(model, tokenizer, name, source, folder.resolve(), known_digest=digest)


def _from_hub(
    identifier: str, name: str, device: torch.device, dtype: torch.dtype | None, revision: str | None
) -> LanguageModel:
    identifier, _, written = identifier.partition("@")
    if written and revision and written != revision:
        raise ModelError(f"{name} names the revision {written!r}, and revision={revision!r} was given too; give one.")
    if not _loading.looks_like_an_id(identifier, owner=False):
        raise ModelError(f"{name!r} is no hub id; one is written hf:OWNER/NAME or hf:OWNER/NAME@REVISION.")
    with _loading.quietly():
        # Configuration, weights and tokenizer of one commit, also if the branch moves in between.
        commit = _loading.commit_of(identifier, name, written or revision)
        model, tokenizer = _loading.load(identifier, name, device, dtype, commit or written or revision)
    digest = None if commit is None else _cache.digest_of_text(f"{identifier}@{commit}")
    return LanguageModel(model, tokenizer, name, "hf", revision=commit, known_digest=digest)


def _bytes_of(lm: LanguageModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in lm.model.parameters())
