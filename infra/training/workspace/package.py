"""What a run keeps of its user's code in ``code/``: an archive, the requirements and the setup command."""

from dataclasses import asdict, dataclass

from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.storage import records
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.workspace.packing import PackedCode

FOLDER = "code"  # in the run's directory
RECORD = "code.json"  # in that
_FORMAT = 1


@dataclass(frozen=True)
class CodePackage:
    """A training's code as nodes find it in the run's directory."""

    digest: str = (
        ""  # SHA-256 of the archive before compression, in hex; empty: there is no working directory
    )
    requirements: str = ""  # text of a requirements file; empty: no environment of its own
    requirements_file: str = ""  # its path in the working directory; empty: it is not there
    setup: str = ""  # shell command that is run once on each node; empty: none
    source: str = ""  # what the working directory was packed from
    commit: str = ""  # of git, where it was one

    @property
    def archive(self) -> str:
        """Return the archive's name beside the record."""
        return f"{self.digest[:32]}.tgz"  # a name in .gz would have pyarrow compress it once more


def put(run: StorageLocation, package: CodePackage, packed: PackedCode | None) -> None:
    """Write a training's code into its run's directory; the record, last, makes it count. Raises ``StorageError``."""
    place = run.under(FOLDER)
    if packed is not None:
        with translated(f"write {place}"):
            place.write(package.archive, packed.data)
    records.save(place.under(RECORD), asdict(package), _FORMAT)


def get(folder: str) -> CodePackage:
    """Return the code of a run from its ``code`` directory, a path or URI. Raises ``TrainingError``."""
    try:
        return CodePackage(**records.load(StorageLocation(folder).under(RECORD), _FORMAT))
    except StorageError as error:
        raise TrainingError(f"the code of the run cannot be read: {error}") from error
    except records.OtherVersionError:
        raise TrainingError(f"{folder}/{RECORD} is of another version of Ebbflow") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{folder}/{RECORD} is damaged ({error}); resume the run with --repack"
        ) from error
