"""How a process of a run leaves before its script is at its end."""

PEER_LOST = 75  # exit status of a survivor: EX_TEMPFAIL of sysexits.h, try again


class RunStopped(SystemExit):
    """Leaves the script; everything is saved that is to be saved.

    Ends the process with ``code``: 0 when the run was requested to stop, 75 when other processes were lost.
    """

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
