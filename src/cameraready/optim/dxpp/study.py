"""The penalty method put to the test: exactness, speed against libdqp's reduced KKT, degenerate programs, training."""

from __future__ import annotations

from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Figure,
    Peer,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    growth,
    ratio,
    versus_best,
    violations,
    within,
)
from cameraready.optim.dxpp.layer import PenaltyQPLayer
from cameraready.optim.dxpp.trials.planned import plan, trial
from cameraready.optim.dxpp.trials.workloads import open_workload

PAPER = "Linghu et al., 2026, arXiv:2602.14154"
DENSE, SPARSE, TASKS = ["random-dense"], ["chain", "simplex"], ["portfolio", "sudoku"]
LIBDQP = ["libdqp", "libdqp-pardiso"]
#: Multipliers of active rows and slacks of the others, relative: where both are above it a program counts as regular.
REGULAR = pl.col("margin") > 1e-5
OURS: dict[str, Any] = {"scope": "ours", "source": "this study", "pooled": False}


def of(part: str) -> pl.Expr:
    return pl.col("part") == part


def at(n: int) -> pl.Expr:
    return of("speed") & (pl.col("n") == n)


FORMULA = of("accuracy") & REGULAR & (pl.col("zeta") == 10.0)
LARGEST = at(10_000)

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["random-dense", "chain", "simplex", "portfolio", "sudoku"],
        "desk": ["random-dense", "chain", "simplex", "portfolio", "sudoku"],
        "full": ["random-dense", "chain", "simplex", "portfolio", "sudoku"],
    },
    plan=plan,
    trial=trial,
    method="dxpp",
    arms="arm",
    block="instance",
    alone=lambda condition: condition["part"] in ("speed", "step", "products"),
    peers=[
        # Without a lock: which build of torch fits is for pip to find out on each machine.
        Peer(
            "libdqp==0.1.2",
            python=">=3.11,<3.13",
            script="peers/dqp_peer.py",
            also=["torch==2.13.0"],
            installer="pip",
        ),
        Peer(
            "diffqcp==0.4.4",
            python=">=3.12,<3.14",
            script="peers/diffqcp_peer.py",
            also=["lineax==0.1.0"],  # later ones ask its operators for properties that diffqcp does not declare
            lock="peers/diffqcp.lock",
        ),
    ],
    libraries={
        "*": ["numpy", "scipy", "torch", "qpsolvers", "clarabel", "piqp"],
        **{name: ["libdqp"] for name in LIBDQP},
        "diffqcp": ["diffqcp"],
        "cvxpylayers": ["cvxpylayers", "diffcp", "cvxpy"],
    },
    accepts=["object", "value"],
    own_arm="a callable (Q, q, G, h, A, b, lb, ub) -> x (n,), differentiable by autograd; float64 tensors, None for what the program lacks",
    covers="the drawing of the programs, or of the training data",
    covers_own="the direction in which your program's solution is differentiated, not the program itself",
    component=lambda workload: PenaltyQPLayer(),
    timeout=900.0,
    claims=[
        Claim(
            1,
            part="a",
            paper="Gradients agree with KKT differentiation at strictly complementary LICQ points.",
            tested="Random dense programs, n = 10 to 450, beta = 1e-6, the paper's formula (no refinement): no gradient of any input is off by"
            " more than 1e-4.",
            scope="exact",
            source=f"{PAPER}, theorem; programs of dQP's generator",
            measure=violations(pl.col("error") > 1e-4, "an error above 1e-4"),
            rule=always(),
            where=FORMULA & (pl.col("beta") == 1e-6) & (pl.col("arm") == "formula"),
            workloads=DENSE,
        ),
        Claim(
            1,
            part="b",
            paper="The error is of order beta.",
            tested="From beta = 1e-3 to 1e-6 the error grows with an exponent between 0.8 and 1.2.",
            scope="exact",
            source=f"{PAPER}, theorem",
            measure=growth("error", "beta", "formula"),
            rule=within(0.8, 1.2),
            where=FORMULA & pl.col("beta").is_between(0.9e-6, 1.1e-3),
            workloads=DENSE,
        ),
        Claim(
            1,
            part="c",
            paper="The same against finite differences.",
            tested="n = 10 to 50, through x and the multipliers, along random directions of all data: no slope is off by more than 1e-4.",
            scope="exact",
            source=PAPER,
            measure=violations(pl.col("difference_error") > 1e-4, "an error above 1e-4"),
            rule=always(),
            where=of("differences") & REGULAR & (pl.col("arm") == "formula"),
            workloads=DENSE,
        ),
        Claim(
            1,
            part="d",
            paper="The same with the official code's rules and its default solver tolerance.",
            tested="Its weights and active set on piqp's point at 1e-6, program as given, beta = 1e-6: no gradient of q is off by more"
            " than 1e-4.",
            scope="exact",
            source=f"{PAPER}, official code",
            measure=violations(pl.col("q_error") > 1e-4, "an error above 1e-4"),
            rule=always(),
            where=FORMULA & (pl.col("beta") == 1e-6) & (pl.col("arm") == "as-published"),
            workloads=DENSE,
        ),
        Claim(
            2,
            part="a",
            paper="Backward is faster than KKT methods on large sparse programs.",
            tested="n = 10,000, from the solution to all gradients: the time is below that of the better of libdqp's two linear solvers.",
            scope="reduced",
            source=f"{PAPER}, tables as quoted in the method's sheet",
            measure=versus_best("own_seconds", "dxpp", peers=LIBDQP),
            rule=below(1.0),
            where=LARGEST,
            workloads=SPARSE,
            pooled=False,
        ),
        Claim(
            2,
            part="b",
            paper="The same, all else equal.",
            tested="n = 10,000: the time of the paper's formula is below that of the reduced KKT matrix by SuperLU in the same program.",
            scope="reduced",
            source=PAPER,
            measure=ratio("own_seconds", "formula", "kkt"),
            rule=below(1.0),
            where=LARGEST,
            workloads=SPARSE,
            pooled=False,
        ),
        Untested(
            2,
            part="c",
            paper="The same at n = 100,000.",
            needs="the full tier, which has that size; an hour on two cores",
            source=PAPER,
        ),
        Claim(
            3,
            paper="It is competitive on dense random programs.",
            tested="n = 450: from the solution to all gradients in less than 1.25 times the time of the reduced KKT matrix by LAPACK's LU.",
            scope="exact",
            source=PAPER,
            measure=ratio("own_seconds", "dxpp", "kkt"),
            rule=below(1.25),
            where=at(450),
            workloads=DENSE,
        ),
        Claim(
            4,
            part="a",
            paper="Gradients are finite where the KKT matrix is singular.",
            tested="Every inequality twice, the copies scaled: all gradients of the paper's formula are finite.",
            scope="exact",
            source=PAPER,
            measure=violations(
                (pl.col("arm") == "formula") & (pl.col("finite") < 1.0), "a gradient that is not finite"
            ),
            rule=always(),
            where=of("repeated") & (pl.col("active") > 0),
            workloads=DENSE,
        ),
        Claim(
            4,
            part="b",
            paper="They are useful there.",
            tested="The gradient of q is within 1e-4 of that of the program without copies.",
            scope="exact",
            source=PAPER,
            measure=violations((pl.col("arm") == "formula") & (pl.col("q_error") > 1e-4), "an error above 1e-4"),
            rule=always(),
            where=of("repeated") & (pl.col("active") > 0),
            workloads=DENSE,
        ),
        Claim(
            4,
            part="c",
            paper="The KKT matrix is singular there.",
            tested="The reduced KKT matrix cannot be factorised (pivots over 1e14 apart) in more than 90 % of these programs.",
            scope="exact",
            source=PAPER,
            measure=average("singular", "kkt"),
            rule=above(0.9),
            where=of("repeated") & (pl.col("active") > 0),
            workloads=DENSE,
        ),
        Claim(
            5,
            paper="The method is solver-agnostic.",
            tested="clarabel, proxqp, osqp and piqp lead to gradients that differ by at most 1e-4 (the paper's formula on polished points).",
            scope="exact",
            source=PAPER,
            measure=violations(pl.col("spread") > 1e-4, "a difference above 1e-4"),
            rule=always(),
            where=of("solvers") & REGULAR & (pl.col("arm") == "formula"),
            workloads=[*DENSE, *SPARSE],
            pooled=False,
        ),
        *(
            Claim(
                6,
                part=part,
                paper="Training a portfolio reaches the same loss as KKT layers.",
                tested=f"Five companies, four weeks, 20 steps of Adam: the held-out loss is within 0.01 (per cent a week) of that of {peer}.",
                scope="reduced",
                source=PAPER,
                measure=difference("loss", "dxpp", peer),
                rule=within(-0.01, 0.01),
                where=of("training"),
                workloads=["portfolio"],
            )
            for part, peer in (("a", "kkt"), ("b", "cvxpylayers"))
        ),
        *(
            Claim(
                6,
                part=part,
                paper="Training on sudoku reaches the same loss as KKT layers.",
                tested=f"4x4 boards, 20 steps of Adam on fresh puzzles: the held-out loss is within 2 % of that of {peer}.",
                scope="reduced",
                source=PAPER,
                measure=ratio("loss", "dxpp", peer),
                rule=within(0.98, 1.02),
                where=of("training"),
                workloads=["sudoku"],
            )
            for part, peer in (("c", "kkt"), ("d", "cvxpylayers"))
        ),
        *(
            Claim(
                7,
                part=part,
                paper="(Ours.) It is at least as fast as libdqp at smaller sizes.",
                tested=f"n = {n:,}, from the solution to all gradients: below the better of libdqp's linear solvers.",
                measure=versus_best("own_seconds", "dxpp", peers=LIBDQP),
                rule=below(1.0),
                where=at(n),
                workloads=SPARSE,
                **OURS,
            )
            for part, n in (("a", 200), ("b", 1_000), ("c", 4_000))
        ),
        Claim(
            7,
            part="d",
            paper="(Ours.) And so on dense programs.",
            tested="n = 450: below libdqp's LU of the dense KKT matrix.",
            measure=ratio("own_seconds", "dxpp", "libdqp"),
            rule=below(1.0),
            where=at(450),
            workloads=DENSE,
            **OURS,
        ),
        Claim(
            8,
            part="a",
            paper="(Ours.) The backward pass alone, which finds a factorisation from the forward pass, is faster still.",
            tested="n = 10,000: loss.backward() takes less than half the time of libdqp's better one.",
            measure=versus_best("pass_seconds", "dxpp", peers=LIBDQP),
            rule=below(0.5),
            where=LARGEST,
            workloads=SPARSE,
            **OURS,
        ),
        Claim(
            8,
            part="b",
            paper="(Ours.) Forward and backward together cost no more, although the forward pass polishes and factorises.",
            tested="n = 10,000, clarabel at 1e-10 in both: the layer's time is below that of libdqp with its better linear solver.",
            measure=versus_best("whole_seconds", "dxpp", peers=LIBDQP),
            rule=below(1.0),
            where=LARGEST,
            workloads=SPARSE,
            **OURS,
        ),
        Claim(
            9,
            part="a",
            paper="(Ours.) Refining on the KKT residual makes the gradient exact.",
            tested="No gradient of any input is off by more than 1e-9 at beta = 1e-6.",
            measure=violations(pl.col("error") > 1e-9, "an error above 1e-9"),
            rule=always(),
            where=of("accuracy") & REGULAR & (pl.col("arm") == "dxpp"),
            workloads=DENSE,
            **OURS,
        ),
        Claim(
            9,
            part="b",
            paper="(Ours.) It costs little.",
            tested="n = 10,000: refined gradients take less than 1.5 times as long as the formula's.",
            measure=ratio("own_seconds", "dxpp", "formula"),
            rule=below(1.5),
            where=LARGEST,
            workloads=SPARSE,
            **OURS,
        ),
        *(
            Claim(
                10,
                part=part,
                paper=f"(Ours.) The traps are closed: {what}.",
                tested="Projection on the simplex, beta = 1e-6: the gradient's error is below a hundredth of that of the official code's rules.",
                measure=ratio("q_error", "dxpp", "as-published", floor=1e-14),
                rule=below(0.01),
                where=of("traps") & (pl.col("case") == case) & (pl.col("beta") == 1e-6),
                workloads=["simplex"],
                **OURS,
            )
            for part, case, what in (
                ("a", "loose", "a forward solution to five digits"),
                ("b", "row units", "every other row multiplied by 1,000"),
                ("c", "objective units", "an objective multiplied by a million"),
            )
        ),
        Claim(
            11,
            part="a",
            paper="(Ours.) A training step is faster than cvxpylayers'.",
            tested="Forward and backward, the same solver to the same tolerance, one thread: below cvxpylayers' time.",
            measure=ratio("own_seconds", "dxpp", "cvxpylayers"),
            rule=below(1.0),
            where=of("step"),
            workloads=TASKS,
            **OURS,
        ),
        Claim(
            11,
            part="b",
            paper="(Ours.) Its gradients are closer to the truth than diffqcp's.",
            tested="Portfolio programs, from our solution: the error of the gradient of q is below a hundredth of diffqcp's.",
            measure=ratio("q_error", "dxpp", "diffqcp", floor=1e-14),
            rule=below(0.01),
            where=of("products"),
            workloads=["portfolio"],
            **OURS,
        ),
        Claim(
            11,
            part="c",
            paper="(Ours.) And cheaper.",
            tested="The time to the gradients is below that of diffqcp's compiled product.",
            measure=ratio("own_seconds", "dxpp", "diffqcp"),
            rule=below(1.0),
            where=of("products"),
            workloads=["portfolio"],
            **OURS,
        ),
        Claim(
            12,
            part="a",
            paper="(Ours.) On your program its gradient is exact.",
            tested="The gradient of q along random directions is within 1e-6 of the KKT system's.",
            measure=violations((pl.col("arm") == "dxpp") & (pl.col("q_error") > 1e-6), "an error above 1e-6"),
            rule=always(),
            where=of("layer"),
            workloads=["random-dense", "own"],
            **OURS,
        ),
        Claim(
            12,
            part="b",
            paper="(Ours.) And no dearer than the KKT matrix's.",
            tested="From the solution to all gradients: less than 1.25 times the time of the reduced KKT matrix.",
            measure=ratio("own_seconds", "dxpp", "kkt"),
            rule=below(1.25),
            where=of("speed") & (pl.col("n") == pl.col("largest")),
            workloads=[*SPARSE, "own"],
            **OURS,
        ),
    ],
    answer=Answer(
        measure=versus_best("own_seconds", "dxpp", exclude=["formula", "as-published", "full-kkt"]),
        better="differentiate {workload} by the penalised Hessian: from the solution to all gradients in {estimate} times [{low}, {high}] the time of {peer}",
        worse="keep {peer} on {workload}: the penalised Hessian takes {estimate} times [{low}, {high}] its time",
        tie="on {workload} the penalised Hessian and {peer} take equally long ({estimate} times [{low}, {high}]); its gradients stay defined where the KKT matrix is singular",
        by="n",
        by_label="with {level} variables",
        where=of("speed"),
        workloads=[*DENSE, *SPARSE, "own"],
    ),
    figures=[
        Figure(
            "Time from the solution to all gradients",
            x="n",
            y="own_seconds",
            source=f"{PAPER}, timing tables",
            where=of("speed"),
            workloads=[*DENSE, *SPARSE],
            x_title="variables",
            y_title="seconds",
        ),
        Figure(
            "Error of the gradient of q",
            x="beta",
            y="q_error",
            source=PAPER,
            where=of("accuracy") & REGULAR & (pl.col("zeta") == 10.0),
            workloads=DENSE,
            x_title="beta",
            y_title="relative error",
        ),
    ],
)
