"""Events about a few nodes, for tests."""

from hypothesis import strategies as st

from ebbflow.infra.aws.notices import events

NODES = ("i-a", "i-b", "i-c")
GROUPS = ("ebbflow-lab-etl", "ebbflow-lab-gpu")
START = 1_795_255_200.0

_node = st.sampled_from(NODES)
_time = st.integers(0, 600).map(lambda seconds: START + seconds)


def event():
    """Return a strategy of single events, all within ten minutes."""
    return st.one_of(
        st.builds(lambda n, t: events.Interruption(n, t, t + 120, "terminate"), _node, _time),
        st.builds(events.Rebalance, _node, _time),
        st.builds(
            events.StateChange, _node, _time, st.sampled_from(["running", "shutting-down", "terminated"])
        ),
        st.builds(events.GroupEnds, _node, _time, st.sampled_from(GROUPS)),
        st.builds(lambda n, t, d: events.NodeLeaving(n, t, t + d, "it"), _node, _time, st.integers(0, 300)),
        st.builds(events.LaunchFailed, st.sampled_from(GROUPS), _time, st.sampled_from(["full", "dear"])),
        st.builds(
            events.Health,
            st.sampled_from(["arn:1", "arn:2"]),
            _time,
            st.lists(_node, unique=True, max_size=2).map(tuple),
            st.just("AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED"),
            st.booleans(),
            _time,
            st.booleans(),
        ),
    )


@st.composite
def stream(draw, most=12):
    """Return events as they happened, and as a queue may deliver them: in any order, some of them again."""
    happened = draw(st.lists(event(), max_size=most))
    again = draw(st.lists(st.sampled_from(happened), max_size=6)) if happened else []
    return happened, draw(st.permutations([*happened, *again]))
