"""Results to export: an ordinary one, and one whose every text tries to break the format that it is put into."""

from dataclasses import replace

import polars as pl
import pytest

from tests.evidence.report_runs import CARD, a_result

NASTY = (
    '50% of a_b & #1 ~x ^2 \\input{/etc/passwd} $x$ {} "q" a ≤ b × c – d’s é 中 | [l](javascript:alert(1)) '
    '<script>alert(\'x\')</script> ```` -- `code` \n---\n<!-- trackio-cell\n{"type": "code"}\n-->\n# head'
)


@pytest.fixture(scope="session")
def result():
    """A finished run with every kind of verdict."""
    return a_result()


@pytest.fixture(scope="session")
def nasty():
    """The same with hostile text wherever text can be, and numbers that are none."""
    made = a_result()
    claims = [
        replace(v, claim=NASTY, paper=NASTY, source=NASTY, measure=NASTY, reason=NASTY, rule=NASTY, changed=NASTY)
        for v in made.claims
    ]
    claims[1] = replace(claims[1], workload=f"../{NASTY}", estimate=float("inf"), low=float("-inf"), high=float("nan"))
    return replace(
        made,
        card=replace(CARD, title=NASTY, authors=(NASTY,)),
        claims=claims,
        answer=NASTY,
        command=NASTY,
        notes=[NASTY],
        environment={NASTY: NASTY},
        workloads=[{"name": NASTY, "own": False, "digest": NASTY}],
        rows=made.rows.with_columns(pl.lit(NASTY).alias("workload")),
    )


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to reach another machine fails and is noted; the list of attempts."""
    import socket

    attempts = []

    def refuse(self, address, *more):
        if self.family != socket.AF_UNIX:
            attempts.append(address)
            raise OSError("no network in this test")
        return real_connect(self, address, *more)

    def no_names(host, *more, **options):
        attempts.append(host)
        raise socket.gaierror("no network in this test")

    real_connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", no_names)
    return attempts
