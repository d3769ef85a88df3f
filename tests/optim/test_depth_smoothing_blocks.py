"""Which blocks and which tensors are found, in models of many shapes."""

import pytest
import torch
from torch import nn

from cameraready.optim.depth_smoothing import DepthSmoothing, find_blocks
from cameraready.optim.depth_smoothing.blocks import groups_from, slots

pytestmark = pytest.mark.torch


def attention(width=4):
    return nn.ModuleDict(
        {"norm": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}
    )


def mlp(width=4):
    return nn.ModuleDict({"norm": nn.LayerNorm(width), "up": nn.Linear(width, 8), "down": nn.Linear(8, width)})


class Model(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def names(model):
    return [(group.name, group.positions) for group in find_blocks(model)]


def linked(groups, name):
    return {slot.name: slot.linked for slot in slots(groups)}[name]


def test_encoder_and_decoder_are_two_groups():
    model = Model(
        embed=nn.Embedding(5, 4),
        encoder=Model(layers=nn.ModuleList(attention() for _ in range(3))),
        decoder=Model(layers=nn.ModuleList(attention() for _ in range(2))),
        head=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    )
    assert names(model) == [("encoder.layers", (0, 1, 2)), ("decoder.layers", (0, 1))]


def test_alternating_blocks_are_neighbours_at_their_stride():
    model = Model(layers=nn.ModuleList([attention(), mlp(), attention(), mlp(), attention()]))
    assert names(model) == [("layers", (0, 2, 4)), ("layers", (1, 3))]
    found = {slot.name: slot for slot in slots(find_blocks(model))}
    assert found["layers.*.qkv.weight"].linked == (True, True)
    assert found["layers.*.up.weight"].linked == (True,)


def test_an_optional_tensor_leaves_a_gap_and_its_block_stays_in_the_group():
    blocks = nn.ModuleList(attention() for _ in range(5))
    blocks[0]["bias"] = nn.Embedding(3, 2)  # as T5 has in its first block alone
    blocks[2]["out"] = nn.Linear(4, 4, bias=False)
    groups = find_blocks(Model(layers=blocks))
    assert groups[0].positions == (0, 1, 2, 3, 4)
    assert linked(groups, "layers.*.out.bias") == (True, False, True)
    assert linked(groups, "layers.*.out.weight") == (True,) * 4
    assert not [slot for slot in slots(groups) if "bias.weight" in slot.name and "norm" not in slot.name]


def test_shapes_that_differ_over_depth_are_separate_slots():
    blocks = nn.ModuleList([mlp(), mlp(), mlp(), mlp()])
    for block in blocks[2:]:
        block["up"], block["down"] = nn.Linear(4, 6), nn.Linear(6, 4)
    found = [
        (slot.name, len(slot.tensors), tuple(slot.tensors[0].shape)) for slot in slots(find_blocks(Model(h=blocks)))
    ]
    assert ("h.*.up.weight", 2, (8, 4)) in found
    assert ("h.*.up.weight", 2, (6, 4)) in found
    assert ("h.*.norm.weight", 4, (4,)) in found


def test_stages_of_different_width_are_searched_inside():
    stages = nn.ModuleList(Model(layers=nn.ModuleList(mlp(width) for _ in range(3))) for width in (4, 8))
    assert names(Model(stages=stages)) == [("stages.0.layers", (0, 1, 2)), ("stages.1.layers", (0, 1, 2))]


def test_experts_inside_a_block_are_not_depth():
    blocks = nn.ModuleList(Model(attn=attention(), experts=nn.ModuleList(mlp() for _ in range(4))) for _ in range(3))
    assert names(Model(layers=blocks)) == [("layers", (0, 1, 2))]


def test_a_plain_perceptron_has_its_equal_layers_as_blocks_and_norms_are_no_linear_layers():
    model = nn.Sequential(
        nn.Linear(8, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4)
    )
    found = {frozenset(map(id, slot.tensors)) for slot in slots(find_blocks(model))}
    linear, norm = [model[3], model[6]], [model[1], model[4]]
    assert found == {
        frozenset(id(layer.weight) for layer in linear),
        frozenset(id(layer.bias) for layer in linear),
        frozenset(id(layer.weight) for layer in norm),
        frozenset(id(layer.bias) for layer in norm),
    }


def test_a_tensor_used_at_several_depths_is_in_one_slot_once():
    blocks = nn.ModuleList(mlp() for _ in range(4))
    blocks[2]["up"].weight = blocks[0]["up"].weight
    found = {slot.name: slot for slot in slots(find_blocks(Model(h=blocks)))}
    assert found["h.*.up.weight"].tensors == (blocks[0]["up"].weight, blocks[1]["up"].weight, blocks[3]["up"].weight)
    assert found["h.*.up.weight"].linked == (True, False)
    everything = [id(t) for slot in slots(find_blocks(Model(h=blocks))) for t in slot.tensors]
    assert len(everything) == len(set(everything))


def test_one_block_used_many_times_has_nothing_to_smooth():
    block = mlp()
    with pytest.raises(ValueError, match="no repeated blocks"):
        groups_from(Model(h=nn.ModuleList([block] * 4)))


def test_a_list_shared_by_two_parts_is_found_once():
    shared = nn.ModuleList(mlp() for _ in range(3))
    assert names(Model(encoder=Model(layers=shared), decoder=Model(layers=shared))) == [("encoder.layers", (0, 1, 2))]


def test_only_wanted_tensors():
    model = Model(h=nn.ModuleList(mlp() for _ in range(3)))
    assert {s.name for s in slots(find_blocks(model), "matrices")} == {"h.*.up.weight", "h.*.down.weight"}
    assert {s.name for s in slots(find_blocks(model), lambda name, p: name == "up.bias")} == {"h.*.up.bias"}


LINEAR = nn.Linear(2, 2)
TRANSFORMERS = {
    "gpt2": (
        {"n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 11},
        ["transformer.h"],
        "GPT2LMHeadModel",
    ),
    "llama": (
        {
            "num_hidden_layers": 3,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 12,
            "vocab_size": 11,
        },
        ["model.layers"],
        "LlamaForCausalLM",
    ),
    "vit": (
        {
            "num_hidden_layers": 3,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "intermediate_size": 12,
            "image_size": 8,
            "patch_size": 4,
        },
        None,
        "ViTForImageClassification",
    ),
    "t5": (
        {"num_layers": 3, "d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 12, "vocab_size": 11},
        ["encoder.block", "decoder.block"],
        "T5ForConditionalGeneration",
    ),
    "bert": (
        {"num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 11},
        ["bert.encoder.layer"],
        "BertForMaskedLM",
    ),
}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_blocks_of_transformers_models(family):
    transformers = pytest.importorskip("transformers")
    options, expected, cls = TRANSFORMERS[family]
    config = getattr(transformers, cls).config_class(**options)
    model = getattr(transformers, cls)(config)
    groups = find_blocks(model)
    assert [len(group.blocks) for group in groups] == [3] * len(groups)
    if expected is not None:
        assert [group.name for group in groups] == expected
    inside = {id(p) for group in groups for block in group.blocks for p in block.parameters()}
    covered = {id(t) for slot in slots(groups) for t in slot.tensors}
    # All but T5's relative position biases, which only its first blocks have.
    assert len(inside - covered) == (2 if family == "t5" else 0)
    assert all(all(slot.linked) for slot in slots(groups))


def test_lora_adapters_are_part_of_the_blocks():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    options, _, cls = TRANSFORMERS["llama"]
    model = getattr(transformers, cls)(transformers.LlamaConfig(**options))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    found = {slot.name: slot for slot in slots(find_blocks(model))}
    adapters = [name for name in found if "lora_" in name]
    assert len(adapters) == 4
    assert all(len(found[name].tensors) == 3 and all(found[name].linked) for name in adapters)
    optimizer = DepthSmoothing(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), model)
    frozen = model.get_base_model().model.layers[0].mlp.up_proj.weight
    before = frozen.clone()
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        for name in adapters:  # B starts at zero, which would leave A without a gradient
            for tensor in found[name].tensors:
                tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    old = {name: torch.stack([t.detach().clone() for t in found[name].tensors]) for name in adapters}
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {name: torch.stack([t.grad for t in found[name].tensors]) for name in adapters}
    optimizer.normalize = "none"
    optimizer.step()
    for name in adapters:
        mixed = torch.stack([0.9 * grads[name][0] + 0.1 * grads[name][1], *grads[name][1:]])
        mixed[1] = 0.8 * grads[name][1] + 0.1 * (grads[name][0] + grads[name][2])
        mixed[2] = 0.9 * grads[name][2] + 0.1 * grads[name][1]
        torch.testing.assert_close(torch.stack(list(found[name].tensors)).detach(), old[name] - 0.1 * mixed)
    assert torch.equal(frozen, before)


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        (nn.Linear(2, 2), ValueError, "no repeated blocks"),
        ([nn.Linear(2, 2)], ValueError, "at least 2"),
        ([nn.Linear(2, 2), "h.1"], TypeError, "str"),
        ("model.h", TypeError, "ModuleList"),
        ([[LINEAR, nn.Linear(2, 2)], [LINEAR, nn.Linear(2, 2)]], ValueError, "twice"),
        ([nn.LazyLinear(2), nn.LazyLinear(2)], ValueError, "run the model once"),
        (Model(heads=nn.ModuleList(nn.Linear(3, 2) for _ in range(4))), ValueError, "no repeated blocks"),
        ([[nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)]], ValueError, "at least 2"),
    ],
)
def test_bad_blocks_are_refused(blocks, error, message):
    with pytest.raises(error, match=message):
        slots(groups_from(blocks))
