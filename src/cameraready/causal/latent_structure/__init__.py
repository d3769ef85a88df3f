"""Latent variables and causal structure from data that differ between groups, sites or periods."""

from cameraready.causal.latent_structure.covers import OracleRank
from cameraready.causal.latent_structure.estimator import LatentCover, LatentStructure
from cameraready.causal.latent_structure.rank_test import RankResult, RankTest

__all__ = ["LatentCover", "LatentStructure", "OracleRank", "RankResult", "RankTest"]
