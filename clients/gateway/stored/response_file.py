"""Writes stored responses to a file of SQLite, and reads them when the gateway starts.

``ResponseStore`` has all of them in memory and decides which are kept; nothing is read from the file later. One process
at a time uses a file.
"""

import os
import sqlite3
from pathlib import Path

from penstock.clients.errors import PenstockError
from penstock.clients.gateway.stored.response_store import Changes
from penstock.clients.gateway.stored.stored_response import Content, StoredResponse

_APPLICATION_ID = 0x70656E73
_VERSION = 1
_BUSY_S = 2.0
"""How long a file may be locked by a gateway that is just ending."""
_TABLE = """\
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    previous_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    input BLOB NOT NULL,
    fields BLOB NOT NULL,
    output BLOB NOT NULL,
    log BLOB NOT NULL,
    is_live INTEGER NOT NULL,
    expires_at REAL NOT NULL,
    is_hidden INTEGER NOT NULL
)
"""
_COLUMNS = "id, tenant, previous_id, session_id, input, fields, output, log, is_live, expires_at, is_hidden"
_WRITE = f"""\
INSERT INTO responses ({_COLUMNS}) VALUES ({", ".join("?" * 11)})
ON CONFLICT (id) DO UPDATE SET fields = excluded.fields, output = excluded.output, log = excluded.log,
    is_live = excluded.is_live, expires_at = excluded.expires_at, is_hidden = excluded.is_hidden
"""


class ResponseFile:
    """The file. Its methods wait for the disk, so the event loop calls them in a thread, one at a time."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or creates it, readable only for this user. Raises PenstockError."""
        self._path = path
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, 0o600)  # SQLite gives its other file, PATH-wal, the same mode
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._problem(f"{error.strerror}; give a file that this user can write") from None
        try:
            self._database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._refusal(error) from None
        try:
            self._open()
        except BaseException as error:
            self._database.close()
            if isinstance(error, sqlite3.Error):
                raise self._refusal(error) from None
            raise

    def load(self) -> list[StoredResponse]:
        """Returns all responses, in the order in which they were stored. If that fails, closes the file and
        raises PenstockError."""
        try:
            rows = self._database.execute(f"SELECT {_COLUMNS} FROM responses ORDER BY number").fetchall()
        except sqlite3.Error as error:
            self._database.close()
            raise self._refusal(error) from None
        return [_response(*row) for row in rows]

    def write(self, changes: Changes) -> None:
        """Writes changes, all or none. Raises sqlite3.Error."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            for response_id, response in changes.items():
                if response is None:
                    database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
                else:
                    database.execute(_WRITE, _row(response))
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def _open(self) -> None:
        database = self._database
        # No other process may use the file: what is live in it would look as if it had been interrupted.
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA secure_delete = ON")  # what was deleted is overwritten
        database.execute("BEGIN IMMEDIATE")
        (application_id,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (application_id, version) != (_APPLICATION_ID, _VERSION):
            if num_tables:
                raise self._problem("it is another program's or another version's; give a file of its own")
            database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {_VERSION}")
        database.execute(_TABLE)
        database.execute("COMMIT")
        ((found,),) = database.execute("PRAGMA quick_check(1)").fetchall()
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def _refusal(self, error: sqlite3.Error) -> PenstockError:
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._problem("another process uses it; give each gateway a file of its own")
        if isinstance(error, sqlite3.OperationalError):
            return self._problem(f"it cannot be used ({error})")
        return self._problem("it is damaged, or no file of SQLite; remove it, or give another one")

    def _problem(self, problem: str) -> PenstockError:
        return PenstockError(f"--responses-file {self._path}: {problem}")


def _response(
    response_id: str,
    tenant: str,
    previous_id: str,
    session_id: str,
    given: bytes,
    fields: bytes,
    output: bytes,
    log: bytes,
    is_live: int,
    expires_at: float,
    is_hidden: int,
) -> StoredResponse:
    content = Content(fields, output, log)
    return StoredResponse(
        response_id, tenant, previous_id, session_id, given, content, bool(is_live), expires_at, bool(is_hidden)
    )


def _row(response: StoredResponse) -> tuple[object, ...]:
    content = response.content
    return (
        response.id,
        response.tenant,
        response.previous_id,
        response.session_id,
        response.input,
        *content,
        response.is_live,
        response.expires_at,
        response.is_hidden,
    )
