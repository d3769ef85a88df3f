"""Repeated blocks of a model, found by structure, and the tensors that correspond to each other over depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn

#: Which tensors of a block are smoothed.
Wanted = Literal["all", "matrices"] | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class BlockGroup:
    """Blocks that repeat in depth.

    Attributes
    ----------
    name : str
        Where they are: ``"transformer.h"``.
    blocks : tuple of Module
        From the first to the last.
    positions : tuple of int
        Their places in the list that holds them. Blocks of another kind may lie between them.
    """

    name: str
    blocks: tuple[nn.Module, ...]
    positions: tuple[int, ...]

    def __repr__(self) -> str:
        return f"BlockGroup({self.name or 'model'}: {len(self.blocks)} x {type(self.blocks[0]).__name__})"


@dataclass(frozen=True)
class Slot:
    """One tensor of the blocks, over depth: `linked[k]` tells whether entries k and k + 1 are neighbours."""

    name: str
    tensors: tuple[nn.Parameter, ...]
    linked: tuple[bool, ...]


Key = tuple[str, type]


def tensors_of(block: nn.Module) -> dict[Key, nn.Parameter]:
    """A block's parameters by name inside the block and by the type of layer that owns them."""
    found: dict[Key, nn.Parameter] = {}
    for path, module in block.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"{name} of {type(module).__name__} has no shape yet; run the model once before smoothing it"
                )
            found[f"{path}.{name}" if path else name, type(module)] = parameter
    return found


def find_blocks(model: nn.Module) -> list[BlockGroup]:
    """Find the lists of repeated blocks in a model.

    Every outermost ``ModuleList`` or ``Sequential`` counts in which at least half of the parameters have a tensor of the same name, owner
    and shape in another entry; what lies inside such a list (experts, layers of a block) is part of its blocks. Entries that share
    less than half of their tensors (attention and Mamba blocks, say) are groups of their own. Lists of bare layers, such as
    those of a plain multilayer perceptron, count only where no list of blocks is found, and only if a layer's output could be the next
    one's input. No class names are looked at. Nothing tells parallel blocks (experts outside such a list, towers, members of an
    ensemble) from depth: look at what was found, and pass the blocks yourself where it is wrong.

    Parameters
    ----------
    model : Module
        Any model; adapters of PEFT inside the blocks are part of them.

    Returns
    -------
    list of BlockGroup
        In the model's order; empty where nothing repeats.

    References
    ----------
    Meng, Sugolov and Papyan, 2026, arXiv:2606.30813, speak of repeated blocks; this search is ours.

    Examples
    --------
    >>> find_blocks(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3))
    [BlockGroup(layers: 3 x TransformerEncoderLayer)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"find_blocks needs a torch Module, got {type(model).__name__}")
    bare: list[BlockGroup] = []
    return list(_search("", model, bare, set())) or bare


def _search(path: str, module: nn.Module, bare: list[BlockGroup], seen: set[int]) -> Iterator[BlockGroup]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        groups = _repeated(path, module)
        if any(next(block.children(), None) is not None for group in groups for block in group.blocks):
            yield from groups
            return
        bare.extend(filter(None, map(_that_keep_width, groups)))
    for name, child in module.named_children():
        yield from _search(f"{path}.{name}" if path else name, child, bare, seen)


def _that_keep_width(group: BlockGroup) -> BlockGroup | None:
    """The bare layers whose matrices are square in their first two dimensions, as far as they have any; None for less than two."""
    kept = [
        (block, position)
        for block, position in zip(group.blocks, group.positions, strict=True)
        if all(p.ndim < 2 or p.shape[0] == p.shape[1] for p in block.parameters())
    ]
    return BlockGroup(group.name, tuple(b for b, _ in kept), tuple(p for _, p in kept)) if len(kept) > 1 else None


def _repeated(path: str, entries: nn.ModuleList | nn.Sequential) -> list[BlockGroup]:
    """The groups in one list, or none where less than half of its parameters repeat."""
    kinds: list[tuple[set[Key], list[tuple[int, nn.Module]]]] = []
    for position, block in enumerate(entries):
        keys = set(tensors_of(block))
        if not keys:
            continue
        for known, members in kinds:
            if 2 * len(keys & known) > len(keys | known):
                members.append((position, block))
                break
        else:
            kinds.append((keys, [(position, block)]))
    groups = [
        BlockGroup(path, tuple(block for _, block in members), tuple(position for position, _ in members))
        for _, members in kinds
        if len(members) > 1
    ]
    repeating = sum(tensor.numel() for group in groups for slot in slots([group]) for tensor in slot.tensors)
    everything = sum(parameter.numel() for parameter in entries.parameters())
    return groups if 2 * repeating >= everything else []


def slots(groups: Sequence[BlockGroup], wanted: Wanted = "all") -> list[Slot]:
    """The tensors that correspond over depth: same group, name, owner and shape; at least two of them.

    Neighbours are those that lie as close as any two of the slot do, so that blocks of alternating kinds are neighbours at their stride,
    while a missing tensor leaves a gap. A tensor that is used at several depths counts once, at the first.
    """
    found: list[Slot] = []
    taken: set[int] = set()
    for group in groups:
        columns: dict[tuple[Key, tuple[int, ...]], list[tuple[int, nn.Parameter]]] = {}
        for position, block in zip(group.positions, group.blocks, strict=True):
            for key, parameter in tensors_of(block).items():
                if id(parameter) not in taken and _is_wanted(key[0], parameter, wanted):
                    taken.add(id(parameter))
                    columns.setdefault((key, tuple(parameter.shape)), []).append((position, parameter))
        for ((name, _), _), members in columns.items():
            if len(members) > 1:
                gaps = [b - a for (a, _), (b, _) in pairwise(members)]
                linked = tuple(gap == min(gaps) for gap in gaps)
                found.append(Slot(f"{group.name}.*.{name}".lstrip("."), tuple(p for _, p in members), linked))
    return found


def _is_wanted(name: str, parameter: nn.Parameter, wanted: Wanted) -> bool:
    if callable(wanted):
        return bool(wanted(name, parameter))
    return wanted == "all" or parameter.ndim >= 2


def groups_from(blocks: nn.Module | Sequence[nn.Module] | Sequence[Sequence[nn.Module]]) -> list[BlockGroup]:
    """What `DepthSmoothing` is given, as groups: a model to search, one list of blocks, or several."""
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.ModuleList):
        groups = find_blocks(blocks)
        if not groups:
            raise ValueError(
                f"no repeated blocks were found in {type(blocks).__name__}; pass them, such as blocks=model.layers or"
                " list(blocks.values()), or a list of lists for several groups"
            )
        return groups
    if isinstance(blocks, (str, bytes)) or not isinstance(blocks, (Sequence, nn.ModuleList)):
        raise TypeError(
            f"blocks must be a model, a ModuleList or list of modules, or a list of those; got {type(blocks).__name__}"
        )
    entries = list(blocks)
    nested = not isinstance(blocks, nn.Module) and all(isinstance(e, (list, tuple, nn.ModuleList)) for e in entries)
    if entries and nested:
        lists = [list(entry) for entry in entries]
    else:
        lists = [entries]
    for entries in lists:
        strangers = [type(entry).__name__ for entry in entries if not isinstance(entry, nn.Module)]
        if strangers:
            raise TypeError(f"blocks holds {', '.join(sorted(set(strangers)))} where modules are expected")
        if len(entries) < 2:
            raise ValueError(f"a group of blocks has {len(entries)} entries; at least 2 are needed to have neighbours")
    given = [id(entry) for entries in lists for entry in entries]
    if len(set(given)) < len(given):
        raise ValueError("a block is given twice; each belongs to one place of one group")
    return [BlockGroup(f"blocks{i}", tuple(entries), tuple(range(len(entries)))) for i, entries in enumerate(lists)]
