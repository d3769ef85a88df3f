"""What a denoiser learns first, put to the test: growth of samples in the mixed cumulant model, networks in training on real images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Figure,
    Gallery,
    Spec,
    Study,
    Untested,
    above,
    average,
    below,
    growth,
    ratio,
)
from cameraready.flows._workload import ACCEPTS, open_flow
from cameraready.flows.mixed_cumulant import SimplicityBiasCallback
from cameraready.flows.mixed_cumulant.experiment import bias, formulas
from cameraready.flows.mixed_cumulant.experiment.claims import FORMULAS, LARGE, OF_OURS
from cameraready.flows.mixed_cumulant.experiment.growth import (
    CORRELATED,
    DIMS,
    FOURTH,
    ICA_DIMS,
    ICA_RUNS,
    PAIRWISE,
    RUNS,
    measured,
    offline,
)

PAPER = "Bardone et al., 2026, arXiv:2603.12901"
SEEDS = 10
IMAGES = [bias.DIGITS, bias.PATCHES]


def open_workload(spec: Spec) -> Any:
    """A shipped name, or the user's data with or without a model."""
    return open_flow(spec, shipped=(PAIRWISE, FOURTH, CORRELATED, FORMULAS, *IMAGES))


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload in DIMS:
        runs = 3 if smoke else RUNS[workload]
        dims = {PAIRWISE: (25, 50), FOURTH: (8, 12), CORRELATED: (25, 50)}[workload] if smoke else DIMS[workload]
        for d in reversed(dims):  # the longest first
            yield {"part": "online", "d": d, "runs": runs}
        peer = {PAIRWISE: "pca", FOURTH: "fastica"}.get(workload)
        if peer:
            some = dims if peer == "pca" or smoke else ICA_DIMS
            for d in reversed(some):
                yield {
                    "part": "offline",
                    "d": d,
                    "runs": 2 if smoke else runs if peer == "pca" else ICA_RUNS,
                    "peer": peer,
                }
    elif workload == FORMULAS:
        yield {"part": "formulas", "runs": 2 if smoke else 12}
    elif workload in IMAGES:
        for arm in ("mixer", "denoiser"):
            yield {"part": "images", "network": arm, "runs": 2 if smoke else SEEDS, "short": smoke}
    else:
        yield {"part": "own", "runs": 2 if smoke else SEEDS, "short": smoke}


def trial(workload: Any, ctx: Context, *, part: str, runs: int, **condition: Any) -> list[dict[str, Any]]:
    if part == "online":
        return list(measured(workload, condition["d"], runs, ctx.select, ctx.seed))
    if part == "formulas":
        return list(formulas.identities(runs))
    if part == "own":
        return list(bias.own(workload, ctx, runs=runs, short=condition["short"]))
    arm = condition["peer" if part == "offline" else "network"]
    if arm in ctx.without:
        return []
    if part == "offline":
        return list(offline(workload, condition["d"], runs, arm, ctx.seed))
    return list(bias.trained(workload, arm, runs, condition["short"], ctx.seed))


def component(workload: Any) -> SimplicityBiasCallback:
    """A callback for training on the user's own data; on shipped workloads one for digits."""
    held_out = bias.data_of(bias.DIGITS)[1] if isinstance(workload, str) else workload.test
    return SimplicityBiasCallback(held_out)


# --- claims ----------------------------------------------------------------------------------------------------------


def only(workload: str, scope: str = "reduced", source: str = PAPER) -> dict[str, Any]:
    return {"scope": scope, "source": source, "workloads": [workload], "pooled": False}


REDUCED: dict[str, Any] = {
    "scope": "reduced",
    "source": f"{PAPER}, abstract",
    "workloads": IMAGES,
    "pooled": False,
}
#: What was otherwise in first runs on the same seeds.
BEFORE = "in first runs the Wiener reference was fitted with training rows alone, and a network whose clones and data never part did not count against"
CHANGED = {
    0.35: f"t = 0.35 was measured and not judged in a first run; {BEFORE}",
    0.65: BEFORE,
    0.8: f"t = 0.8 was measured and not judged in a first run; {BEFORE}",
}


def on_images(t: float, arm: str, part: str) -> list[Claim]:
    """What is claimed of a network at one noise level; `part` is the first of three letters."""
    letters = [chr(ord(part) + i) for i in range(3)]
    where, network = pl.col("time") == t, "" if arm == "denoiser" else ", an MLP-mixer"
    return [
        Claim(
            4,
            part=letters[0],
            paper="Diffusion models on natural images learn pair-wise statistics first.",
            tested=f"t = {t:g}{network}: when the error on held-out data has come within a quarter of the Wiener denoiser's, the gap between Gaussian clones and data is below half of what it comes to.",
            measure=average("early_share", arm),
            rule=below(0.5),
            where=where,
            changed=CHANGED[t],
            **REDUCED,
        ),
        Claim(
            4,
            part=letters[1],
            paper="They specialise to higher-order correlations later.",
            tested=f"t = {t:g}{network}: half of the final gap between clones and data is reached later than that error (ratio of steps above 1).",
            measure=average("lag", arm),
            rule=above(1.0),
            where=where,
            changed=CHANGED[t],
            **REDUCED,
        ),
        Claim(
            4,
            part=letters[2],
            paper="They come to use correlations beyond the pair-wise.",
            tested=f"t = {t:g}{network}: the error at the end is below that of the Wiener denoiser, fitted with the held-out rows as well.",
            measure=average("final", arm),
            rule=below(1.0),
            where=where,
            changed=CHANGED[t],
            **REDUCED,
        ),
    ]


STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": [PAIRWISE, FOURTH, CORRELATED, FORMULAS, *IMAGES],
        "desk": [FOURTH, *IMAGES, PAIRWISE, CORRELATED, FORMULAS],
        "full": [FOURTH, *IMAGES, PAIRWISE, CORRELATED, FORMULAS],
    },
    plan=plan,
    trial=trial,
    method="denoiser",
    arms="arm",
    block="run",
    libraries={"*": ["numpy", "scipy", "torch"], "fastica": ["scikit-learn"]},
    accepts=ACCEPTS,
    own_arm="an activation for the neuron, as a pair (function, derivative) of arrays, elementwise",
    component=component,
    covers="starts and draws of the online runs, initialisations and batches of the networks",
    covers_own="held-out rows and noise where you gave a model; initialisations and batches where one was trained",
    claims=[
        Claim(
            1,
            paper="The denoiser learns pair-wise statistics at linear sample complexity.",
            tested="Samples until |w.u| >= 0.5 grow with d, 25 to 400, with an exponent below 1.3 (tanh, batch 64, step 4 / d).",
            measure=growth("samples", "d", "denoiser"),
            rule=below(1.3),
            **only(PAIRWISE),
        ),
        Claim(
            2,
            part="a",
            paper="The fourth cumulant alone requires at least cubic sample complexity.",
            tested="Samples until |w.v| >= 0.8 grow with d, 12 to 40, with an exponent above 2.5, at the step that keeps drift over noise the same in every d (a multiple of 1 / d^2).",
            measure=growth("samples", "d", "denoiser"),
            rule=above(2.5),
            **only(FOURTH),
        ),
        Claim(
            2,
            part="b",
            paper="At linear sample size there is no recovery.",
            tested="d = 24 to 40: below a twentieth of the runs have recovered v by 50 d samples.",
            measure=average("early", "denoiser"),
            rule=below(0.05),
            where=LARGE,
            **only(FOURTH),
        ),
        Claim(
            3,
            part="a",
            paper="With a correlated latent structure the fourth cumulant is learnt at linear sample complexity.",
            tested="Samples until |w.v| >= 0.3, latents correlated, grow with d, 25 to 400, with an exponent below 1.3.",
            measure=growth("samples", "d", "denoiser"),
            rule=below(1.3),
            **only(CORRELATED),
        ),
        Claim(
            3,
            part="b",
            paper="v is learnt soon after u.",
            tested="v takes less than 3 times the samples of u, in the same run.",
            measure=average("lag", "denoiser"),
            rule=below(3.0),
            **only(CORRELATED),
        ),
        Claim(
            3,
            part="c",
            paper="Independent latents: v is not learnt at that sample size.",
            tested="d = 200 and 400: below a twentieth of the runs have |w.v| >= 0.3 within 400 d samples.",
            measure=average("recovered", "independent"),
            rule=below(0.05),
            where=pl.col("d") >= 200,
            **only(CORRELATED),
        ),
        *(
            claim
            for arm, first in (("denoiser", "a"), ("mixer", "j"))
            for place, t in enumerate(bias.TIMES)
            for claim in on_images(t, arm, chr(ord(first) + 3 * place))
        ),
        Untested(
            4,
            part="s",
            paper="The same for a U-Net on CIFAR-10.",
            needs="CIFAR-10, a U-Net of 35 million parameters and a GPU for hours; SimplicityBiasCallback goes into its training loop as it is",
            source=PAPER,
        ),
        Claim(
            5,
            paper="The exponent decides: an activation without coupling at degree four does not find the fourth cumulant.",
            tested="d = 24 to 40: with ReLU, whose coefficients of degree four and more vanish, below a twentieth of the runs reach |w.v| >= 0.8 in 10 d^3 samples.",
            measure=average("recovered", "relu"),
            rule=below(0.05),
            where=LARGE,
            **only(FOURTH),
        ),
        *OF_OURS,
    ],
    answer=Answer(
        measure=ratio("error", "denoiser", "wiener"),
        better="on {workload} the network has gone beyond pair-wise statistics: its error is {estimate} times [{low}, {high}] that of the best denoiser that knows only mean and covariance",
        worse="on {workload} the network has not reached the best denoiser that knows only mean and covariance: its error is {estimate} times [{low}, {high}] as large",
        tie="on {workload} the network does as well as mean and covariance allow, no better ({estimate} times [{low}, {high}] the error)",
        by="time",
        by_label="at t = {level}",
        workloads=[*IMAGES, "own"],
    ),
    figures=[
        Figure(
            "Samples until the direction is recovered",
            x="d",
            y="samples",
            source=f"{PAPER}; this study",
            workloads=[PAIRWISE, FOURTH, CORRELATED],
            x_title="dimension",
            y_title="samples",
        ),
        *(
            Figure(
                f"Error on data and on Gaussian clones in training, t = {t:g}",
                x="step",
                y="relative",
                source=f"{PAPER}; this study",
                where=pl.col("time") == t,
                workloads=[*IMAGES, "own"],
                x_title="training step",
                y_title="error over the Wiener denoiser's",
            )
            for t in bias.TIMES
        ),
    ],
    galleries=[
        Gallery(
            "What networks are trained on, and clones with its mean and covariance",
            alt="alt",
            caption="caption",
            source="this study",
            workloads=IMAGES,
        )
    ],
    timeout=600.0,
    memory=4.0,
)
