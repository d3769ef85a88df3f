"""Cases for the conformance test of the room."""

from cameraready.lm.watermark_power import WatermarkCalibrator, exact_detect
from tests.lm.component_cases import Case


def calibrate(model, tokenizer):
    return WatermarkCalibrator.from_model(
        model, tokenizer, ["the quick brown fox", "a lazy dog"], max_new_tokens=4, top_k=50, temperature=0.9
    ).predict(0.25, 2.0, alpha=1e-2, length=20)


def detect(model, tokenizer):
    plan = WatermarkCalibrator.high_entropy().predict(0.25, 2.0, alpha=1e-2, length=20)
    return exact_detect([list(range(5, 25))], plan.to_transformers(), model)


CASES = [Case("calibration", calibrate), Case("detection", detect)]
