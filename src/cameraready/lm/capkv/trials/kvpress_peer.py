"""The side of the study and of its tests that runs in kvpress's own environment: its presses, and CapKVPress under its hooks."""

import sys
import time

import kvpress
import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, pipeline

WRAPPERS = {
    "plain": lambda press, layers: press,
    "adakv": lambda press, layers: kvpress.AdaKVPress(press),
    "chunk": lambda press, layers: kvpress.ChunkPress(press, chunk_length=1024),
    "chunkkv": lambda press, layers: kvpress.ChunkKVPress(press, chunk_length=4),
    "per-layer": lambda press, layers: kvpress.PerLayerCompressionPress(
        press, [0.25 + 0.5 * (i % 2) for i in range(layers)]
    ),
    "composed": lambda press, layers: kvpress.ComposedPress([press, kvpress.KnormPress(0.25)]),
    "key-rerotation": lambda press, layers: kvpress.KeyRerotationPress(press),
}


def ours(source, options):
    """CapKVPress of the package whose sources are in the folder `source`."""
    if source not in sys.path:
        sys.path.insert(0, source)
    from cameraready.lm.capkv import CapKVPress

    return CapKVPress(**options)


def tiny(source, kind, options):
    if source not in sys.path:
        sys.path.insert(0, source)
    from cameraready.models import tiny_model

    return tiny_model(kind, **options)


def made(source, name, options):
    return ours(source, options) if name == "CapKVPress" else getattr(kvpress, name)(**options)


def scores(source, kind, model_options, ids, name, options):
    """The scores that press `name` gives each layer of a tiny model while it reads `ids` (B, T): a list of (B, Hkv, T)."""
    model = tiny(source, kind, model_options)
    press = made(source, name, options)
    found, score = [], press.score

    def recorded(*args, **kwargs):
        found.append(score(*args, **kwargs))
        return found[-1]

    press.score = recorded
    torch.manual_seed(0)  # LeverageScorePress draws its sketch from the global generator of this process
    with torch.no_grad(), press(model):
        model.model(torch.as_tensor(ids), past_key_values=DynamicCache())
    return [each.float().numpy() for each in found]


def generated(source, kind, model_options, ids, name, options, wrapper, n_new):
    """Tokens and logits (n_new, vocab) of greedy decoding after `wrapper` around press `name` pruned the context; and what is left."""
    model = tiny(source, kind, model_options)
    press = WRAPPERS[wrapper](made(source, name, options), model.config.num_hidden_layers)
    cache, ids = DynamicCache(), torch.as_tensor(ids)
    found = []
    with torch.no_grad():
        with press(model):
            token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        left = [layer.keys.shape[2] for layer in cache.layers]
        for step in range(n_new):
            positions = torch.tensor([[ids.shape[1] + step]])
            logits = model(token, past_key_values=cache, position_ids=positions).logits[:, -1:]
            found.append(logits[0, 0].float().numpy())
            token = logits.argmax(-1)
    return {"logits": np.stack(found), "left": left}


def answers(source, kind, model_options, name, options, context, questions):
    """What kvpress's pipeline answers under press `name`."""
    model = tiny(source, kind, model_options)
    from cameraready.models import tiny_tokenizer

    asked = pipeline("kv-press-text-generation", model=model, tokenizer=tiny_tokenizer())
    return asked(context, questions=questions, press=made(source, name, options), max_new_tokens=8)["answers"]


def seconds(source, heads, kv_heads, head_dim, length, warmup, repeats):
    """Seconds of one layer's scores by CapPress and by CapKVPress, in turn, on random states: two lists."""
    generator = torch.Generator().manual_seed(0)
    config = LlamaConfig(
        hidden_size=heads * head_dim, intermediate_size=64, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    module = model.model.layers[0].self_attn
    module.rotary_emb = model.model.rotary_emb
    hidden = torch.randn(1, length, heads * head_dim, generator=generator)
    keys, values = torch.randn(2, 1, kv_heads, length, head_dim, generator=generator)
    presses = {"cappress": kvpress.CapPress(0.5), "capkv": ours(source, {"compression_ratio": 0.5})}
    found = {name: [] for name in presses}
    with torch.no_grad():
        for repeat in range(-warmup, repeats):
            names = list(presses) if repeat % 2 else list(presses)[::-1]
            for name in names:
                started = time.perf_counter()
                presses[name].score(module, hidden, keys, values, None, {})
                if repeat >= 0:
                    found[name].append(time.perf_counter() - started)
    return found
