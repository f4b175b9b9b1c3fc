"""Files of one JSON object a line."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from minedraft.config import ConfigError

_Record = TypeVar("_Record")


def read(
    lines: Iterable[bytes | str], kind: type[_Record], file: str
) -> Iterator[tuple[str, _Record]]:
    """The objects, blank lines skipped: each with the place where it stands.

    ``file`` is for the places, and for the message of the ConfigError.
    """
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, 1):
        place = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{place}: {error}") from error
        yield place, record
