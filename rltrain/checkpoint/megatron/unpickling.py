"""Reading pickles of Megatron checkpoints as data: nothing that a pickle names is ever imported or called.

What a pickle would import is replaced by a Record that only notes what would have been called with what. Names outside
the packages whose objects checkpoints are known to hold are refused, since they say that somebody wants more than data.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from rltrain.errors import CheckpointError

DATA_PACKAGES = (
    "_codecs",
    "argparse",
    "collections",
    "datetime",
    "enum",
    "functools",
    "megatron",
    "numpy",
    "pathlib",
    "signal",
    "torch",
    "types",
)
DATA_BUILTINS = ("bytearray", "complex", "frozenset", "getattr", "object", "range", "set", "slice")
"""Of these getattr names the members of enumerations."""

BUILTINS_IN_OLD_PROTOCOLS = {"__builtin__": "builtins"}

NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")

PLAIN = {
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
}
"""What is made as it is, because other objects are kept in it or compared with it."""


class Record:
    """An object of a pickle: the name of its class or of the function that makes it, its arguments, state and items."""

    name: str
    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *arguments: Any, **named: Any) -> "Record":
        record = super().__new__(cls)
        record.arguments, record.state, record.items = (*arguments, *named.values()), {}, []
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)


class _Data(pickle.Unpickler):
    """Makes Records in place of objects."""

    def find_class(self, module: str, name: str) -> Any:
        module = BUILTINS_IN_OLD_PROTOCOLS.get(module, module)
        full = f"{module}.{name}"
        if full in PLAIN:
            return PLAIN[full]
        package = module.split(".")[0]
        if package not in DATA_PACKAGES and not (package == "builtins" and name in DATA_BUILTINS):
            raise _Refused(full)
        return type(name, (Record,), {"name": full})

    def persistent_load(self, pid: Any) -> Any:
        """Storages of tensors, which lie beside the pickle: none is needed."""
        return Record(pid)


class _Refused(Exception):  # noqa: N818 - names what was found
    """The pickle names something that is no data."""


def read_pickle(path: Path) -> Any:
    """What the file `path` holds. CheckpointError where it is missing, damaged or names what is no data."""
    with _opened(path) as file:
        return unpickle(file, str(path))


def read_torch_pickle(path: Path, offset: int = 0, length: int = -1) -> Any:
    """Returns what torch.save wrote into `path`, or into `length` bytes of it from `offset`, without tensors.

    CheckpointError as for read_pickle.
    """
    with _opened(path) as file:
        try:
            file.seek(offset)
            with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                pickled = archive.read(name)
        except (zipfile.BadZipFile, ValueError, OSError) as problem:
            raise CheckpointError(f"{path} is damaged or was not written by torch.save: {problem}") from None
        return unpickle(io.BytesIO(pickled), str(path))


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror}") from None


def unpickle(file: IO[bytes], where: str) -> Any:
    """What a pickle holds. CheckpointError, which begins with `where`, where it is damaged or names what is no data."""
    try:
        return _Data(file).load()
    except _Refused as refused:
        raise CheckpointError(
            f"{where} asks for {refused}, which is no data: loading it could run code. The file was not loaded; get "
            "the checkpoint from where you trust it"
        ) from None
    except Exception as problem:  # a damaged pickle can raise almost anything
        raise CheckpointError(f"{where} is damaged: {problem!r}") from None


def plain(value: Any) -> Any:
    """`value` with simple namespaces as dicts, members of enumerations as their values, paths and types as strings."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, type) and issubclass(value, Record):
        return value.name
    if not isinstance(value, Record):
        return value
    if value.name in NAMESPACES:
        return plain(value.state)
    if value.name.startswith("pathlib."):
        return str(PurePosixPath(*value.arguments))
    return plain(value.arguments[-1]) if value.arguments else value.name
