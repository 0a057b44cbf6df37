"""Pure: what a disk holds, what of it is durable, and what a power loss may leave.

Owns: `DiskModel`, files and folders below one root, with every change since the last sync. It is
told what is done to a disk (or is the disk, in memory) and answers with images: `image` as it is
after a killed process, `survive` as one of the many that a power loss may leave.

Invariants of every image that `survive` gives:
1. What was synced is there; of a sector (512 bytes) that was written since, one of the contents
   that it had since is there, whole. Each sector chooses for itself: any subset, not a prefix.
2. The size of a file is one that it had since its last sync; a part that grew but was not written
   reads as zeros.
3. A name that was created, renamed or removed since the last sync of its folder is as before or
   as after; a rename happens whole or not at all, and a change needs the earlier changes of the
   same names. A synced file whose name is not durable may vanish; a name never has no file.

Paths are relative to the root, with "/". Errors are the `OSError`s of a real file system.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol, TypeVar

SECTOR_BYTES: Final = 512

Choice = TypeVar("Choice")


class Chance(Protocol):
    """A source of chance, from which decisions come; `random.Random` is one."""

    def random(self) -> float: ...

    def randrange(self, start: int, /) -> int: ...


@dataclass(slots=True, eq=False)
class ModelFile:
    """The content of a file, whatever names it has; also a handle that outlives its names."""

    data: bytearray = field(default_factory=bytearray)
    """As written, durable or not."""
    _sectors: dict[int, list[bytes]] = field(default_factory=dict)
    """What each sector changed since the last sync held: the durable content first."""
    _sizes: list[int] = field(default_factory=lambda: [0])
    """The durable size, then each one since."""
    _dropped: dict[int, bytes] = field(default_factory=dict)
    """What the disk holds of sectors that a failed sync gave up: not what is read."""

    @property
    def is_synced(self) -> bool:
        return not self._sectors and not self._dropped and len(self._sizes) == 1

    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def write(self, offset: int, data: bytes) -> None:
        if not data:
            return
        # Whole sectors: what was in them beside the new bytes is at risk, too (invariant 1).
        touched = range(offset // SECTOR_BYTES, -(-(offset + len(data)) // SECTOR_BYTES))
        self._remember(touched)
        # A write behind the end leaves a hole of zeros, as on a real file system.
        if offset > len(self.data):
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data
        self._changed(touched)

    def truncate(self, size: int) -> None:
        """Cut the file, or let it grow with zeros."""
        # Cutting and growing touch the same sectors: those between the old end and the new one.
        low, high = sorted((size, len(self.data)))
        touched = range(low // SECTOR_BYTES, -(-high // SECTOR_BYTES))
        self._remember(touched)
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        self._changed(touched)

    def sync(self) -> None:
        self._sectors.clear()
        self._sizes = [len(self.data)]

    def fail_sync(self, chance: Chance) -> None:
        """A sync that reported an error: some sectors reached the disk, the others never will.

        Reads go on to show what was written, and a later sync succeeds without writing it: so
        does a kernel that has marked the pages clean.
        """
        newest = _odds(chance)
        for sector, versions in self._sectors.items():
            chosen = _pick(versions, newest, chance)
            # Read as written, and gone at a power loss: what a page
            # cache does after a failed fsync.
            if chosen != versions[-1]:
                self._dropped[sector] = chosen
        self._sectors.clear()
        # The size, too, may have stayed behind on the disk.
        self._sizes = [_pick(self._sizes, newest, chance), len(self.data)]

    def survive(self, chance: Chance) -> bytes:
        """The content after a power loss."""
        if self.is_synced:
            return bytes(self.data)
        newest = _odds(chance)
        size = _pick(self._sizes, newest, chance)
        # Room for the longest past of the file: a cut that did
        # not reach the disk brings bytes back.
        longest = max(*self._sizes, -(-len(self.data) // SECTOR_BYTES) * SECTOR_BYTES)
        content = self.data + bytes(longest - len(self.data))
        # Given up by a failed sync, and not written since.
        for sector, held in self._dropped.items():
            start = sector * SECTOR_BYTES
            content[start : start + SECTOR_BYTES] = held
        for sector in sorted(self._sectors):
            start = sector * SECTOR_BYTES
            chosen = _pick(self._sectors[sector], newest, chance)
            content[start : start + SECTOR_BYTES] = chosen
        del content[size:]
        content.extend(bytes(size - len(content)))
        return bytes(content)

    def _remember(self, sectors: range) -> None:
        for sector in sectors:
            if sector not in self._sectors:
                # The first version is what the disk holds, which after a
                # failed sync is not what is read.
                held = self._dropped.pop(sector, b"")
                self._sectors[sector] = [held or self._sector(sector)]

    def _changed(self, sectors: range) -> None:
        for sector in sectors:
            self._sectors[sector].append(self._sector(sector))
        if len(self.data) != self._sizes[-1]:
            self._sizes.append(len(self.data))

    def _sector(self, sector: int) -> bytes:
        start = sector * SECTOR_BYTES
        return bytes(self.data[start : start + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")


@dataclass(slots=True, eq=False)
class _Folder:
    entries: dict[str, _Entry] = field(default_factory=dict)
    durable: dict[str, _Entry] = field(default_factory=dict)
    changes: list[dict[str, _Entry | None]] = field(default_factory=list)
    """Since the last sync, each whole or not at all: what a name became (None: removed)."""

    def change(self, change: dict[str, _Entry | None]) -> None:
        self.changes.append(change)
        _apply(self.entries, change)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.changes.clear()

    def survive(self, chance: Chance) -> dict[str, _Entry]:
        """The names after a power loss."""
        entries = dict(self.durable)
        newest = _odds(chance)
        lost: set[str] = set()
        for change in self.changes:
            # Invariant 3: a change of a name whose earlier change was lost is lost with it.
            if lost.isdisjoint(change) and chance.random() < newest:
                _apply(entries, change)
            else:
                lost.update(change)
        return entries


_Entry = ModelFile | _Folder


class DiskModel:
    """Files and folders below one root, which always exists."""

    def __init__(self, image: Mapping[str, bytes] | None = None) -> None:
        """A disk that holds `image`, all of it durable."""
        self._root = _Folder()
        for path, content in (image or {}).items():
            parent, name = self._parent(path, create=True)
            file = ModelFile(bytearray(content))
            file.sync()
            # From an image: all of it has survived already.
            parent.entries[name] = parent.durable[name] = file

    # --- files

    def open(self, path: str, *, create: bool = False) -> ModelFile:
        parent, name = self._parent(path)
        found = parent.entries.get(name)
        if found is None and create:
            found = ModelFile()
            parent.change({name: found})
        if isinstance(found, ModelFile):
            return found
        _refuse(errno.ENOENT if found is None else errno.EISDIR, path)

    def read(self, path: str, offset: int, size: int) -> bytes:
        return self.open(path).read(offset, size)

    def write(self, path: str, offset: int, data: bytes) -> None:
        self.open(path).write(offset, data)

    def truncate(self, path: str, size: int) -> None:
        self.open(path).truncate(size)

    def sync(self, path: str) -> None:
        self.open(path).sync()

    def size(self, path: str) -> int:
        return self.open(path).size()

    # --- names

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def list(self, folder: str) -> list[str]:
        return sorted(self._folder(folder).entries)

    def make_folder(self, folder: str) -> None:
        """Make a folder in one that exists; an existing one is no error."""
        parent, name = self._parent(folder)
        found = parent.entries.get(name)
        if found is None:
            parent.change({name: _Folder()})
        elif isinstance(found, ModelFile):
            _refuse(errno.EEXIST, folder)

    def sync_folder(self, folder: str) -> None:
        self._folder(folder).sync()

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in the same folder; a file of that name is replaced."""
        parent, old_name = self._parent(old)
        new_parent, new_name = self._parent(new)
        # A rename over folders would change two of them as one; the model has no such change.
        if new_parent is not parent:
            _refuse(errno.EXDEV, new)
        file = self.open(old)
        if new_name != old_name:
            # One change of two names: invariant 3 wants it whole or not at all.
            parent.change({old_name: None, new_name: file})

    def remove(self, path: str) -> None:
        self.open(path)
        parent, name = self._parent(path)
        parent.change({name: None})

    def bytes_used(self) -> int:
        """The sizes of all files that have a name."""
        return _size_of(self._root)

    # --- images

    def image(self) -> dict[str, bytes]:
        """Path and content of every file as written: what a killed process leaves."""
        return dict(sorted(_files(self._root, "", None)))

    def survive(self, chance: Chance) -> dict[str, bytes]:
        """Path and content of every file after a power loss: one possibility of many."""
        return dict(sorted(_files(self._root, "", chance)))

    # --- finding

    def _find(self, path: str) -> _Entry | None:
        found: _Entry | None = self._root
        for part in _parts(path):
            found = found.entries.get(part) if isinstance(found, _Folder) else None
        return found

    def _folder(self, path: str) -> _Folder:
        found = self._find(path)
        if isinstance(found, _Folder):
            return found
        _refuse(errno.ENOENT if found is None else errno.ENOTDIR, path)

    def _parent(self, path: str, *, create: bool = False) -> tuple[_Folder, str]:
        parts = _parts(path)
        if not parts:
            _refuse(errno.EISDIR, path)
        folder = self._root
        for part in parts[:-1]:
            inner = folder.entries.get(part)
            if inner is None and create:
                inner = folder.entries[part] = folder.durable[part] = _Folder()
            if not isinstance(inner, _Folder):
                _refuse(errno.ENOENT if inner is None else errno.ENOTDIR, path)
            folder = inner
        return folder, parts[-1]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _apply(entries: dict[str, _Entry], change: Mapping[str, _Entry | None]) -> None:
    for name, entry in change.items():
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry


def _size_of(folder: _Folder) -> int:
    return sum(
        _size_of(each) if isinstance(each, _Folder) else each.size()
        for each in folder.entries.values()
    )


def _files(folder: _Folder, prefix: str, chance: Chance | None) -> list[tuple[str, bytes]]:
    """What is below a folder, as it is or (with `chance`) as a power loss leaves it."""
    found: list[tuple[str, bytes]] = []
    entries = folder.entries if chance is None else folder.survive(chance)
    for name in sorted(entries):
        entry = entries[name]
        path = prefix + name
        if isinstance(entry, _Folder):
            found.extend(_files(entry, path + "/", chance))
        else:
            found.append((path, bytes(entry.data) if chance is None else entry.survive(chance)))
    return found


def _odds(chance: Chance) -> float:
    """How likely a change reached the disk: often all did or none, else something between."""
    # Extremes are the likeliest to break a recovery: all or nothing in half of the cases.
    kind = chance.randrange(4)
    return (0.0, 1.0, 0.5, chance.random())[kind]


def _pick(versions: list[Choice], newest: float, chance: Chance) -> Choice:
    """The newest version with these odds, else any earlier one."""
    if len(versions) == 1 or chance.random() < newest:
        return versions[-1]
    return versions[chance.randrange(len(versions) - 1)]


def _refuse(number: int, path: str) -> NoReturn:
    raise OSError(number, errno.errorcode[number], path)
