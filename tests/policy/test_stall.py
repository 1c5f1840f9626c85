"""Only time that the watcher saw pass makes a thing old."""

from hypothesis import given
from hypothesis import strategies as st

from tokenpath.policy.stall import Stall

looks = st.lists(
    st.tuples(st.sampled_from([None, 1, 2]), st.floats(0.0, 100.0, allow_nan=False)), max_size=60
)


@given(looks, st.floats(0.5, 20.0))
def test_stuck_is_what_was_seen_unchanged_for_longer_than_the_limit(looks, limit_s):
    stall = Stall(limit_s, most_s=2.0)
    before, age_s = None, 0.0
    for what, passed_s in looks:
        age_s = age_s + min(passed_s, 2.0) if what is not None and what == before else 0.0
        before = what
        assert stall.observe(what, passed_s) == (age_s > limit_s)


def test_a_machine_that_was_suspended_has_killed_nobody():
    stall = Stall(10.0, most_s=2.0)
    stall.observe("step 1", 1.0)
    assert not stall.observe("step 1", 8 * 3600.0)
    assert not stall.observe("step 1", -5.0), "a clock that went back"
    assert not any(stall.observe("step 1", 1.0) for _ in range(8))
    assert stall.observe("step 1", 1.0)
