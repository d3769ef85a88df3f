"""The side of the study that runs in MarkLLM's own environment: its KGW detector on tokens that the caller gives.

MarkLLM is installed without its dependencies, of which KGW needs torch and transformers alone; the caller says where these are.
"""

import json
import sys
import tempfile
from pathlib import Path


def score(places, config, vocab_size, texts):
    """MarkLLM's z-score and number of green tokens of each text; `config` is written as the JSON file that it loads.

    `places` are the folders of the caller's torch and transformers.
    """
    sys.path.extend(place for place in places if place not in sys.path)
    import torch
    from markllm.utils.transformers_config import TransformersConfig
    from markllm.watermark.kgw import KGW

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "KGW.json"
        path.write_text(json.dumps(config))
        kgw = KGW(str(path), TransformersConfig(None, None, vocab_size=vocab_size, device="cpu"))
    found = [kgw.utils.score_sequence(torch.as_tensor(text)) for text in texts]
    return {"z": [float(z) for z, _ in found], "green": [sum(flag == 1 for flag in flags) for _, flags in found]}
