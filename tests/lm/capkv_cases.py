"""Ways to use CapKV on a language model, for the room's conformance test."""

import torch

from cameraready.lm.capkv import CapKVPress, QueryAnchors, prune_cache
from tests.lm.component_cases import Case


def ids_of(tokenizer):
    return tokenizer("A context, and another one, of which not everything is kept.", return_tensors="pt").input_ids


def generate(**options):
    def use(model, tokenizer):
        with CapKVPress(0.5, **options)(model):
            return model.generate(ids_of(tokenizer), max_new_tokens=4, do_sample=False)

    return use


def prune(model, tokenizer):
    ids = ids_of(tokenizer)
    with torch.no_grad(), QueryAnchors(model) as anchors:
        cache = model(ids[:, :-4], use_cache=True).cache
    return model.generate(ids, cache=prune_cache(cache, anchors, 0.75), max_new_tokens=4, do_sample=False)


CASES = [
    Case("press", generate()),
    Case("greedy", generate(selection="greedy")),
    Case("adaptive", generate(head_budgets="adaptive")),
    Case("prune", prune),
]
