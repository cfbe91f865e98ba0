"""How a server is set up."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_runtime.request import DraftTokens


@dataclass(frozen=True)
class ServeOptions:
    """Limits and names.

    Attributes:
        name: what requests call the model.
        api_key: what requests to /v1 must carry; None asks for none.
        max_body_bytes: largest body of a request.
        max_new_tokens: most tokens that a request may ask for; None leaves it to the length of the context.
        timeout: seconds after which an answer is given up; None never.
        draft_tokens: K where a request does not say it; None takes the runtime's.
        body_timeout: seconds from the head of a request in which all of its body has to come.
        send_timeout: seconds that a client may take nothing of its stream before it is given up.
        max_open: requests that may be under way, the undelivered ones included.
    """

    name: str
    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    max_new_tokens: int | None = None
    timeout: float | None = None
    draft_tokens: DraftTokens | None = None
    body_timeout: float = 60.0
    send_timeout: float = 60.0
    max_open: int = 512
