"""Latent exploration decoding: sample with the help of the last layers' own doubts (Tan et al., 2026, arXiv:2602.01698)."""

from cameraready.lm.led.config import LEDConfig
from cameraready.lm.led.distribution import LEDStep, led_distribution
from cameraready.lm.led.generation import LEDOutput, led_generate, led_logprobs
from cameraready.lm.led.processor import LEDProcessor

__all__ = [
    "LEDConfig",
    "LEDOutput",
    "LEDProcessor",
    "LEDStep",
    "led_distribution",
    "led_generate",
    "led_logprobs",
]
