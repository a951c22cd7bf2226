"""Who may change documents: whoever has the token; without a token nobody."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from quiver.encoder import InputError
from quiver.retrieval.serving.problems import RequestError

VARIABLE = "QUIVER_TOKEN"
"""The environment variable that a token is read from."""

# Shorter ones are guessed.
_SHORTEST = 16


class Access:
    """Compares tokens.

    Args:
        token: The one that allows changes; None allows none.

    Attributes:
        writable: Whether changes are possible at all.
    """

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else _digest(token)
        self.writable = token is not None

    def check(self, given: str | None) -> None:
        """Let a change through, or not.

        Args:
            given: The token of the request; None where it has none.

        Raises:
            RequestError: 403: the service takes no changes; 401: no token, or another one.
        """
        if self._digest is None:
            raise RequestError(403, "read_only", "this service takes no changes; start it with --token-file to allow them")
        # Digests have one length, and are compared in one time whatever was sent.
        if given is None or not hmac.compare_digest(_digest(given), self._digest):
            problem = "send the header Authorization: Bearer TOKEN" if given is None else "this token is not the service's"
            raise RequestError(401, "unauthorized", problem, {"WWW-Authenticate": "Bearer"})


def read_token(file: Path | None) -> str | None:
    """The token of a file, or of the environment; None where there is neither.

    Raises:
        InputError: It cannot be read, or is too short.
    """
    if file is None:
        token, origin = os.environ.get(VARIABLE, ""), VARIABLE
        if not token:
            return None
    else:
        origin = str(file)
        try:
            token = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: cannot be read as a token ({error})") from error
    token = token.strip()
    if len(token) < _SHORTEST:
        raise InputError(f"{origin}: a token has {_SHORTEST} characters at least; make one with: openssl rand -hex 32")
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
