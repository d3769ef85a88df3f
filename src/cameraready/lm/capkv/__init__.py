"""Which tokens of a context tell most: log-determinant scores for the key-value cache, and caches pruned by them."""

from cameraready.lm.capkv.anchors import QueryAnchors
from cameraready.lm.capkv.cache import prune_by_scores
from cameraready.lm.capkv.press import CapKVPress, prune_cache
from cameraready.lm.capkv.scores import capkv_scores, greedy_scores

__all__ = ["CapKVPress", "QueryAnchors", "capkv_scores", "greedy_scores", "prune_by_scores", "prune_cache"]
