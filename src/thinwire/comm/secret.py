"""A secret that every rank must know to join. It is proved and never sent."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from thinwire.errors import UsageError

VARIABLE = "THINWIRE_SECRET"
LEAST_CHARACTERS = 16
MOST_BYTES = 4096
PROOF_BYTES = NONCE_BYTES = 32
HOW_TO_MAKE = "make one with: (umask 077; openssl rand -hex 32 > secret.txt), and copy that file to every machine"


class Secret:
    """A secret, which no message and no representation shows.

    >>> Secret("correct horse battery staple")
    Secret(hidden)
    """

    def __init__(self, text: str) -> None:
        self._key = hmac.digest(text.encode(), b"thinwire: ranks join", hashlib.sha256)

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")

    def prove(self, role: str, *parts: bytes) -> bytes:
        """HMAC-SHA256 of a role and parts, each with its length: a proof that whoever made it knows the secret.

        >>> Secret("correct horse battery staple").prove("rank", b"nonce").hex()[:8]
        'a8faed17'
        """
        message = b"".join(len(part).to_bytes(4, "big") + part for part in (role.encode(), *parts))
        return hmac.digest(self._key, message, hashlib.sha256)

    def accepts(self, proof: bytes, role: str, *parts: bytes) -> bool:
        """Whether a proof is that of this secret. How long the answer takes says nothing of the right proof."""
        return hmac.compare_digest(proof, self.prove(role, *parts))


def read_secret(file: Path | None = None) -> Secret | None:
    """The secret in a file; without a file, the one in THINWIRE_SECRET; None without either. Checks who can read it."""
    if file is None:
        text = os.environ.get(VARIABLE)
        return None if text is None else _checked(text, VARIABLE)
    option = f"--secret-file {file}"
    try:
        with open(file, "rb", opener=_open_at_once) as opened:
            about = os.fstat(opened.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise UsageError(f"{option}: it is no regular file; {HOW_TO_MAKE}")
            if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{option}: other users of this machine may open it; keep it yours: chmod 600 {file}")
            text = opened.read(MOST_BYTES + 1).decode()
    except OSError as error:
        raise UsageError(f"{option}: {error.strerror}; {HOW_TO_MAKE}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option}: it is not text; {HOW_TO_MAKE}") from None
    return _checked(text, option)


def forget_variable() -> None:
    """Remove the secret from this process's environment, so that nothing that runs here later can record it."""
    os.environ.pop(VARIABLE, None)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes to would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _checked(text: str, where: str) -> Secret:
    text = text.strip()
    if not LEAST_CHARACTERS <= len(text) <= MOST_BYTES:
        what = f"a secret has {LEAST_CHARACTERS} to {MOST_BYTES} characters, this one has {len(text)}"
        raise UsageError(f"{where}: {what}; {HOW_TO_MAKE}")
    return Secret(text)
