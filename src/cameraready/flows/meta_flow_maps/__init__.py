"""Meta flow maps: draws from the posterior of clean data in one call, and what they make cheap (steering, values, fine-tuning).

Potaptchik et al., 2026, arXiv:2601.14430.
"""

from cameraready.flows.meta_flow_maps.backbones import FlowBackbone, MapMLP
from cameraready.flows.meta_flow_maps.finetuning import Finetuned, finetune
from cameraready.flows.meta_flow_maps.inner import PosteriorFlow, inner_velocity
from cameraready.flows.meta_flow_maps.maps import MetaFlowMap
from cameraready.flows.meta_flow_maps.steering import Steered, Steering
from cameraready.flows.meta_flow_maps.trainer import MFMTrainer, PowerZero
from cameraready.flows.meta_flow_maps.value import ValueEstimate, value_estimate, value_gradient

__all__ = [
    "Finetuned",
    "FlowBackbone",
    "MFMTrainer",
    "MapMLP",
    "MetaFlowMap",
    "PosteriorFlow",
    "PowerZero",
    "Steered",
    "Steering",
    "ValueEstimate",
    "finetune",
    "inner_velocity",
    "value_estimate",
    "value_gradient",
]
