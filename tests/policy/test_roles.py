"""Who prefills for whom."""

from hypothesis import given
from hypothesis import strategies as st

from tokenpath.policy.handover import gives, least_busy, takes_requests, without_partner

ROLES = st.lists(st.sampled_from(["both", "prefill", "decode"]), min_size=1, max_size=5)


@given(roles=ROLES, peers=st.booleans(), listens=st.booleans())
def test_roles_are_refused_exactly_if_somebody_is_left_alone(roles, peers, listens):
    decodes, prefills = "decode" in roles, "prefill" in roles
    givers = any(gives(role) for role in roles)
    alone = (
        (decodes and not givers and not peers)
        or (prefills and not decodes and not listens)
        or (peers and not decodes)
        or (listens and not givers)
    )
    assert (without_partner(roles, peers=peers, listens=listens) is not None) == alone
    if not alone and not listens:
        assert any(takes_requests(role) for role in roles)


@given(st.lists(st.none() | st.integers(0, 100), max_size=6))
def test_the_prefiller_with_the_fewest_tokens_is_asked(tokens):
    place = least_busy(tokens)
    usable = [count for count in tokens if count is not None]
    assert (place is None) == (not usable)
    if place is not None:
        assert tokens[place] == min(usable)
