"""What a client is told when it cannot be served: a status, a short code for programs, a sentence for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import Response

from vitkit.errors import VitkitError


class Problem(VitkitError):
    """An answer that is not what was asked for. `code` stays the same between versions; the words may not."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after

    def response(self) -> Response:
        body = json.dumps({"error": {"code": self.code, "message": str(self)}}, ensure_ascii=False)
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="vitkit"'
        return Response(body.encode(errors="replace"), self.status, headers, media_type="application/json")


class ClientGone(Exception):
    """Nobody is listening any more; whatever was begun for this client can stop."""


def busy(what: str = "too many pictures are waiting") -> Problem:
    return Problem(503, "busy", f"{what}; try again in a second", retry_after=1)


def in_words(errors: Sequence[Any], meaning: Mapping[str, str]) -> str:
    """What pydantic found wrong with the fields of a request, as one sentence for each; `meaning` of the fields."""
    told = []
    for error in errors:
        name = str(error["loc"][1]) if len(error["loc"]) > 1 else "the request"
        given = "" if error["type"] == "missing" else f"={str(error.get('input'))[:60]!r}"
        reason = f"{error['msg'][:1].lower()}{error['msg'][1:]}"
        if error["type"] == "string_pattern_mismatch":
            reason = "not understood"
        wanted = f" ({meaning[name].rstrip('.')})" if name in meaning else ""
        told.append(f"{name}{given}: {reason}{wanted}")
    return "; ".join(told)
