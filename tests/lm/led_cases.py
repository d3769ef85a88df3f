"""How latent exploration decoding is used on a language model."""

import torch

from cameraready.lm.led import LEDConfig, LEDProcessor, led_generate, led_logprobs
from tests.lm.component_cases import Case

LED = LEDConfig(depth=2, think_end=None)


def generate(model, tokenizer):
    inputs = tokenizer(["one", "twenty-two"], return_tensors="pt", padding=True)
    generator = torch.Generator().manual_seed(0)
    out = led_generate(model, inputs, led=LED, generator=generator, max_new_tokens=3, return_logprobs=True)
    return out.logprobs


def process(model, tokenizer):
    inputs = tokenizer("one", return_tensors="pt")
    with LEDProcessor(model, LED, emit="best") as processor:
        return model.generate(**inputs, logits_processor=[processor], max_new_tokens=3)


def score(model, tokenizer):
    with torch.no_grad():
        return led_logprobs(model, tokenizer("one", return_tensors="pt")["input_ids"], 1, led=LED)


CASES = [Case("led-generate", generate), Case("led-processor", process), Case("led-logprobs", score)]
