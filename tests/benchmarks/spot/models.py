"""Large models trained in pipelines on spot nodes: speeds and recovery costs (Oobleck, SOSP 2023, artefact).

Pipelines have twelve stages, one node each. Speeds are samples/s for 30, 29, …, 15 nodes; fewer count as 15, more
as 30.
"""

from collections.abc import Mapping
from dataclasses import dataclass

MOST, LEAST = 30, 15
"""The node counts between which speeds were measured."""


@dataclass(frozen=True, slots=True)
class SpotModel:
    """One model. Times in ms; sequences run from 30 nodes down to 15."""

    name: str
    parameters: float
    samples: int  # of one step
    checkpoint: int
    restart: int  # including a checkpoint; before the first start where ``restart_by_nodes`` is given
    reform: int  # to re-form pipelines from the survivors, in place
    restarting: tuple[float, ...]  # samples/s, pipelines that restart from checkpoints (Varuna)
    in_place: tuple[float, ...]  # samples/s, pipelines that are re-formed (Oobleck); 0: does not fit
    idle: tuple[int, ...] = (0,) * 16  # nodes left over by the pipelines that restart
    restart_by_nodes: tuple[int, ...] = ()

    def restart_on(self, nodes: int) -> int:
        """Return ms of a restart, checkpoint included, of a system that ran on ``nodes`` (0: never yet)."""
        if not self.restart_by_nodes or not nodes:
            return self.restart
        return self.restart_by_nodes[position(nodes)]

    def idle_of(self, nodes: int) -> int:
        """Return the nodes of ``nodes`` that no pipeline uses; 0 where it was not measured."""
        return self.idle[MOST - nodes] if LEAST <= nodes <= MOST else 0


def position(nodes: int) -> int:
    """Return where ``nodes`` stands in a sequence from 30 down to 15."""
    return MOST - min(max(nodes, LEAST), MOST)


_IDLE_GPT_2 = (0, 1, 0, 0, 2, 1, 0, 2, 1, 0, 0, 1, 0, 1, 0, 0)
_IDLE_GPT_3 = (2, 2, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3)

MODELS: Mapping[str, SpotModel] = {
    model.name: model
    for model in (
        SpotModel(
            "BERT-large",
            parameters=340e6,
            samples=8192,
            checkpoint=15800,
            restart=76000,
            reform=2000,
            restarting=(
                343.1328746,
                331.6951121,
                329.5800552,
                326.5438348,
                306.0386227,
                298.3794267,
                290.038974,
                280.0744467,
                267.8972968,
                255.720147,
                243.5429971,
                232.9541711,
                222.3653452,
                211.7765192,
                202.5688445,
                193.3611697,
            ),
            in_place=(
                368.2457947,
                362.2151579,
                328.35419,
                327.7784909,
                329.1392983,
                307.2134406,
                304.4540075,
                278.5264442,
                285.8442276,
                260.3144683,
                261.6788898,
                243.5568988,
                228.0545262,
                209.2082907,
                214.8045205,
                192.304776,
            ),
            restart_by_nodes=(
                71300,
                67600,
                67600,
                49100,
                112000,
                108300,
                104600,
                100900,
                97200,
                93500,
                89800,
                86100,
                82400,
                78700,
                75000,
                71300,
            ),
        ),
        SpotModel(
            "GPT-2",
            parameters=345e6,
            samples=1024,
            checkpoint=11500,
            restart=83000,
            reform=2000,
            restarting=(
                125.7855818,
                117.6280102,
                117.6280102,
                106.8250673,
                110.9162094,
                102.0772415,
                102.0772415,
                96.65353837,
                96.65353837,
                85.83389481,
                88.31094283,
                78.31133417,
                78.31133417,
                70.46360441,
                70.46360441,
                64.29935764,
            ),
            in_place=(
                110.006361,
                109.6700319,
                98.83702293,
                100.0745098,
                99.47997185,
                91.01817697,
                90.52226774,
                83.40446265,
                83.33064533,
                76.94978926,
                76.71496194,
                71.58697434,
                66.7500461,
                63.01561583,
                62.74772262,
                55.9161269,
            ),
            idle=_IDLE_GPT_2,
        ),
        SpotModel(
            "GPT-3 medium",
            parameters=350e6,
            samples=819,
            checkpoint=11200,
            restart=78700,
            reform=3000,
            restarting=(
                41.99773336,
                38.88588843,
                38.88588843,
                35.85035677,
                33.42576818,
                33.42576818,
                33.42576818,
                28.26386056,
                28.26386056,
                28.26386056,
                28.23158201,
                25.26139038,
                25.26139038,
                22.8891583,
                22.8891583,
                20.91158092,
            ),
            in_place=(
                38.46834258,
                37.18606449,
                35.90378641,
                34.62150832,
                33.33923024,
                31.66581788,
                30.24118675,
                28.96443398,
                27.77451984,
                26.68489205,
                25.68850493,
                23.82505659,
                23.0340881,
                21.57654709,
                20.86545671,
                19.10313139,
            ),
            idle=_IDLE_GPT_2,
        ),
        SpotModel(
            "GPT-3 2.7B",
            parameters=2.7e9,
            samples=512,
            checkpoint=50000,
            restart=515000,
            reform=6000,
            restarting=(
                9.767532721,
                9.424740405,
                9.424740405,
                9.099911677,
                9.099911677,
                9.099911677,
                9.099911677,
                7.469736582,
                7.469736582,
                7.469736582,
                7.469736582,
                6.424614304,
                6.424614304,
                6.424614304,
                6.424614304,
                4.863785398,
            ),
            in_place=(
                9.214308445,
                8.90716483,
                8.600021215,
                8.2928776,
                7.985733985,
                7.627088295,
                7.512265791,
                7.435358417,
                7.052828884,
                6.704817778,
                6.797312924,
                6.105000318,
                6.115063714,
                5.630658991,
                5.630621249,
                5.130663366,
            ),
            idle=_IDLE_GPT_3,
        ),
        SpotModel(
            "GPT-3 6.7B",
            parameters=6.7e9,
            samples=1024,
            checkpoint=120000,
            restart=701000,
            reform=10000,
            restarting=(
                5.240635953,
                5.240635953,
                5.240635953,
                5.096885803,
                5.096885803,
                5.096885803,
                5.096885803,
                4.503390788,
                4.503390788,
                4.503390788,
                4.503390788,
                3.953767179,
                3.953767179,
                3.953767179,
                3.953767179,
                3.016421755,
            ),
            in_place=(
                5.507784136,
                5.324191332,
                5.140598527,
                4.957005722,
                4.773412918,
                4.808826127,
                4.329925297,
                4.185194343,
                3.947198754,
                4.010855553,
                4.15443025,
                3.71233106,
                3.593275995,
                3.283996229,
                3.530908551,
                0,
            ),
            idle=_IDLE_GPT_3,
        ),
    )
}
