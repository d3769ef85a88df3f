"""Drug-like molecules for flows: ChEMBL's drugs in a continuous latent, with a pretrained flow, surrogates with gradients, and rdkit's truth."""

from cameraready.flows._molecules.recipes import SMALL, Settings
from cameraready.flows._molecules.workload import Molecules, molecules

__all__ = ["SMALL", "Molecules", "Settings", "molecules"]
