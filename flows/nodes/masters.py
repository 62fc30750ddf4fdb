"""Spark masters by name: ``local-fleet`` is the master of a local fleet's Spark workers."""

LOCAL_FLEET = "local-fleet"


def resolve_master(master: str) -> str:
    """Return the address of the Spark master that ``local-fleet[:NAME]`` names; other values as they are.

    Raises ``ClusterError`` for a fleet that is not up, or has no Spark workers.
    """
    word, _, name = master.partition(":")
    if word != LOCAL_FLEET:
        return master
    from ebbflow.infra.errors import ClusterError
    from ebbflow.infra.local_fleet import LocalFleet

    fleet = LocalFleet.attach(name or "local")
    if not fleet.spark_master:
        raise ClusterError(
            f"the local fleet {fleet.name!r} has no Spark workers; start a fleet with some: "
            "ebbflow local up --spark 2 --name NAME"
        )
    return fleet.spark_master
