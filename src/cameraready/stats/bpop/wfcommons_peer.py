"""The side of the study that runs in WfCommons' own environment: synthetic workflows of its recipes."""

import contextlib
import io
import random

import numpy as np


def workflows(recipe: str, sizes: list[int], seed: int) -> dict[str, np.ndarray]:
    """Workflows of about as many tasks as `sizes` says: relations (k, n_max, n_max), padded, and their true sizes (k,)."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from wfcommons import WorkflowGenerator
        from wfcommons.wfchef import recipes

        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (WfCommons draws from both global generators)
        built = [WorkflowGenerator(getattr(recipes, recipe).from_num_tasks(size)).build_workflow() for size in sizes]
    matrices = []
    for workflow in built:
        names = sorted(workflow.nodes)
        place = {name: i for i, name in enumerate(names)}
        relation = np.zeros((len(names), len(names)), dtype=bool)
        for before, after in workflow.edges:
            relation[place[before], place[after]] = True
        matrices.append(relation)
    largest = max(len(m) for m in matrices)
    padded = np.zeros((len(matrices), largest, largest), dtype=bool)
    for i, m in enumerate(matrices):
        padded[i, : len(m), : len(m)] = m
    return {"relations": padded, "sizes": np.array([len(m) for m in matrices])}
