import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.fleet.lifecycle import TRANSITIONS, IllegalTransitionError, Lifecycle, move
from tokenpath.policy.backoff import Backoff, BackoffConfig
from tokenpath.protocol.replica import ReplicaState as S


def test_every_pair_of_states_either_moves_or_is_an_error():
    for source, target in itertools.product(S, S):
        if target in TRANSITIONS[source]:
            assert move(Lifecycle(source), target, "why") == Lifecycle(target, "why")
        else:
            with pytest.raises(IllegalTransitionError, match=f"from {source} to {target}"):
                move(Lifecycle(source), target)


def test_a_whole_life():
    life = Lifecycle()
    for state in (S.LOADING, S.READY, S.PENDING, S.LOADING, S.READY, S.DRAINING, S.STOPPED):
        life = move(life, state)
    assert life.state is S.STOPPED


def test_every_state_is_reachable_and_only_stopped_is_an_end():
    assert set().union(*TRANSITIONS.values()) == set(S)
    assert [state for state in S if not TRANSITIONS[state]] == [S.STOPPED]
    assert all(
        S.STOPPED in targets for state, targets in TRANSITIONS.items() if state is not S.STOPPED
    )


def test_a_replica_that_never_gets_ready_is_given_up():
    backoff = Backoff(BackoffConfig(initial_s=1, factor=2, max_s=3, failed_starts=5))
    assert [backoff.after_exit(None) for _ in range(5)] == [1, 2, 3, 3, None]


def test_a_replica_that_was_ready_is_never_given_up():
    backoff = Backoff(BackoffConfig(initial_s=1, factor=2, max_s=4, stable_s=60, failed_starts=2))
    assert [backoff.after_exit(1.0) for _ in range(5)] == [1, 2, 4, 4, 4]
    assert backoff.after_exit(60.0) == 1  # it had been stable: forgiven
    assert backoff.after_exit(0.0) == 2


def test_getting_ready_once_forgives_the_failed_starts():
    backoff = Backoff(BackoffConfig(failed_starts=2))
    assert backoff.after_exit(None) is not None
    assert backoff.after_exit(0.1) is not None
    assert backoff.after_exit(None) is not None
    assert backoff.after_exit(None) is None


@given(st.lists(st.one_of(st.none(), st.floats(0, 1000)), max_size=50))
def test_pauses_stay_within_their_bounds(runs):
    config = BackoffConfig()
    backoff = Backoff(config)
    failed_starts = 0
    for ready_s in runs:
        failed_starts = failed_starts + 1 if ready_s is None else 0
        pause = backoff.after_exit(ready_s)
        assert (pause is None) == (failed_starts >= config.failed_starts)
        assert pause is None or config.initial_s <= pause <= config.max_s
