"""Which trial goes where: the plan's order, blocks that stay together, hosts that cannot, trials under suspicion."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from cameraready.evidence.execution.cluster.board import LOSSES, Board, Seat
from cameraready.evidence.outcomes import Outcome, Trial


def trials(n: int, *, blocks: int = 1, alone: bool = False) -> list[Trial]:
    return [Trial(str(i), "m", "w", {}, 0, "ab"[i % 2], str(i // 2 % blocks), alone) for i in range(n)]


def seats(n: int, hands: int = 1, machines: int | None = None) -> list[Seat]:
    return [Seat(f"tcp://{i}", f"host{i}", f"machine{i % (machines or n)}", hands) for i in range(n)]


def done(trial: Trial) -> Outcome:
    return Outcome(trial.key, "done", seconds=1.0)


def unfit(trial: Trial) -> Outcome:
    return Outcome(trial.key, "raised", error="no such peer", final=False)


def test_one_host_gets_the_plans_order() -> None:
    (seat,) = hosts = seats(1)
    board = Board(trials(20), hosts)
    order = []
    while pairs := list(board.deal()):
        for _, trial in pairs:
            order.append(trial.key)
            board.ended(seat, trial, done(trial))
    assert order == [str(i) for i in range(20)]
    assert board.left == 0


def test_a_host_holds_no_more_than_its_hands_unless_trials_are_short() -> None:
    (seat,) = hosts = seats(1, hands=3)
    board = Board(trials(100), hosts)
    given = [trial for _, trial in board.deal()]
    assert len(given) == 3
    for trial in given * 10:
        seat.note(Outcome(trial.key, "done", seconds=0.001))
    assert 3 < seat.room + len(seat.at) <= 100


def test_blocks_that_run_alone_stay_on_a_machine_and_have_it_to_themselves() -> None:
    hosts = seats(4, hands=2, machines=2)
    board = Board(trials(40, blocks=5, alone=True), hosts)
    where = defaultdict(set)
    running: list[tuple[Seat, Trial]] = []
    while board.left:
        running += board.deal()
        machines = [seat.machine for seat, _ in running]
        assert len(machines) == len(set(machines))
        seat, trial = running.pop(0)
        where[trial.block].add(seat.machine)
        board.ended(seat, trial, done(trial))
    assert len(where) == 5
    assert all(len(machines) == 1 for machines in where.values())
    assert set().union(*where.values()) == {"machine0", "machine1"}


def test_a_block_moves_when_its_host_is_lost_and_a_note_says_so() -> None:
    hosts = seats(2)
    board = Board(trials(2, alone=True), hosts)
    ((first, trial),) = board.deal()
    board.ended(first, trial, done(trial))
    hosts.remove(first)
    ((second, _),) = board.deal()
    assert second.machine != first.machine
    assert board.notes == ["block 0 of w was measured on more than one host, since the first was lost"]


def test_what_a_host_cannot_do_others_get_and_nobody_is_asked_twice() -> None:
    hosts = seats(2)
    board = Board(trials(6), hosts)
    recorded = []
    while board.left:
        for seat, trial in list(board.deal()):
            cannot = trial.arm == "a" and seat is hosts[0]
            recorded += board.ended(seat, trial, unfit(trial) if cannot else done(trial))
    assert sorted(trial.key for trial, _ in recorded) == [str(i) for i in range(6)]
    assert all(outcome.status == "done" for _, outcome in recorded)
    assert board.notes == ["host0 did not run a on w: no such peer"]


def test_what_no_host_can_do_is_recorded_for_all_trials_of_its_kind() -> None:
    hosts = seats(2)
    board = Board(trials(10), hosts)
    recorded, tried = {}, 0
    while board.left:
        for seat, trial in list(board.deal()):
            tried += trial.arm == "a"
            for each, outcome in board.ended(seat, trial, unfit(trial) if trial.arm == "a" else done(trial)):
                assert outcome.key == each.key
                recorded[each.key] = outcome.status
    assert recorded == {str(i): "raised" if i % 2 == 0 else "done" for i in range(10)}
    assert tried <= 3


@given(deadly=st.sets(st.integers(0, 11), max_size=4), hands=st.integers(1, 4), n_seats=st.integers(1, 3))
def test_only_trials_that_kill_their_hosts_count_as_died(deadly: set[int], hands: int, n_seats: int) -> None:
    hosts = seats(n_seats, hands)
    board = Board(trials(12), hosts)
    recorded: dict[str, str] = {}
    running: list[tuple[Seat, Trial]] = []
    turns = 0
    while board.left:
        turns += 1
        assert turns < 1_000
        running += board.deal()
        seat, trial = running.pop(0)
        if int(trial.key) in deadly:
            victims = [(s, t) for s, t in running if s is seat]
            running = [(s, t) for s, t in running if s is not seat]
            ended = [each for s, t in [(seat, trial), *victims] for each in board.lost(s, t, suspicious=True)]
        else:
            ended = board.ended(seat, trial, done(trial))
        recorded |= {t.key: outcome.status for t, outcome in ended}
    died = {int(key) for key, status in recorded.items() if status == "died"}
    assert len(recorded) == 12
    assert deadly <= died
    # Those beside a killer come under suspicion once; from then on they are alone on their host.
    assert LOSSES < 2 or died == deadly


def test_a_broken_connection_makes_nobody_suspect() -> None:
    (seat,) = hosts = seats(1)
    board = Board(trials(1), hosts)
    for _ in range(3 * LOSSES):
        ((_, trial),) = board.deal()
        assert board.lost(seat, trial, suspicious=False) == []
    ((_, trial),) = board.deal()
    assert board.ended(seat, trial, done(trial)) == [(trial, done(trial))]


def test_after_closing_only_what_runs_is_left() -> None:
    hosts = seats(2)
    board = Board(trials(10), hosts)
    given = list(board.deal())
    board.close()
    assert board.left == len(given) == 2
    assert list(board.deal()) == []
