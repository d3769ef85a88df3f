"""CapKVPress inside kvpress, in kvpress's own environment: CapPress's scores, and every wrapper."""

from pathlib import Path

import numpy as np
import pytest
import torch

import cameraready
from cameraready.evidence.peers.environments import open_peer
from cameraready.lm import capkv
from cameraready.lm.capkv.study import KVPRESS

pytestmark = [pytest.mark.torch, pytest.mark.peers]

SOURCE = str(Path(cameraready.__file__).parents[1])
MODEL = {"seed": 3, "n_layers": 2}
OPTIONS = {"compression_ratio": 0.5}


@pytest.fixture(scope="module")
def peer():
    with open_peer(KVPRESS, Path(capkv.__file__).parent) as remote:
        yield remote


def ids(length=60, seed=0):
    return torch.randint(0, 250, (1, length), generator=torch.Generator().manual_seed(seed)).numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("tau", [0.0, 5.0, 10.0])
def test_scores_are_those_of_kvpresss_own_press_for_the_paper(peer, kind, tau):
    options = {**OPTIONS, "tau": tau}
    theirs = peer.scores(SOURCE, kind, MODEL, ids(), "CapPress", options)
    found = peer.scores(SOURCE, kind, MODEL, ids(), "CapKVPress", options)
    assert len(found) == len(theirs) == 2
    for one, other in zip(found, theirs, strict=True):
        np.testing.assert_allclose(one[..., 4:], other[..., 4:], rtol=1e-3, atol=1e-6)
        assert (one[..., :4] > one[..., 4:].max()).all()


@pytest.mark.parametrize("wrapper", ["plain", "adakv", "chunk", "chunkkv", "per-layer", "composed", "key-rerotation"])
def test_every_wrapper_takes_it_as_it_takes_kvpresss_own(peer, wrapper):
    theirs = peer.generated(SOURCE, "llama", MODEL, ids(), "CapPress", OPTIONS, wrapper, 4)
    found = peer.generated(SOURCE, "llama", MODEL, ids(), "CapKVPress", OPTIONS, wrapper, 4)
    assert found["left"] == theirs["left"]
    assert min(found["left"]) < 60 or wrapper == "adakv"
    np.testing.assert_allclose(found["logits"], theirs["logits"], atol=1e-4)


def test_greedy_choice_runs_under_kvpress(peer):
    found = peer.generated(SOURCE, "llama", MODEL, ids(), "CapKVPress", {**OPTIONS, "selection": "greedy"}, "plain", 4)
    assert found["left"] == [30, 30]
    assert np.isfinite(found["logits"]).all()


def test_kvpresss_pipeline_answers_the_same_with_either(peer):
    asked = ("It was a long context, of which half may go.", ["What was it?", "And then?"])
    theirs = peer.answers(SOURCE, "llama", MODEL, "CapPress", OPTIONS, *asked)
    assert peer.answers(SOURCE, "llama", MODEL, "CapKVPress", OPTIONS, *asked) == theirs
    assert len(theirs) == 2


def test_short_contexts_are_left_alone_where_kvpresss_own_refuses(peer):
    found = peer.generated(SOURCE, "llama", MODEL, ids(4), "CapKVPress", OPTIONS, "plain", 2)
    assert found["left"] == [4, 4]
    with pytest.raises(RuntimeError, match="must be larger than n_sink"):
        peer.generated(SOURCE, "llama", MODEL, ids(4), "CapPress", OPTIONS, "plain", 2)
