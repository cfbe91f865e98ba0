"""The command `mtp-run serve`. The server's own libraries are imported when it starts, so that others need none."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from mtp_engines.backends.options import EngineOptions
from mtp_engines.errors import RequestError
from mtp_runtime.batching.options import BatchOptions
from mtp_runtime.cli import DraftTokensParameter, bundle_argument, engine_options, find_bundle, open_model
from mtp_runtime.request import AUTO, DraftTokens, request_from

_LIBRARIES = ("fastapi", "prometheus_client", "uvicorn")


@click.command()
@bundle_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--served-name", help="What requests call the model.  [default: name of the bundle]")
@click.option("--slots", type=click.IntRange(min=1), help="Answers at once.  [default: as built]")
@click.option("--max-queue", type=click.IntRange(min=0), default=256, show_default=True, help="Answers that may wait.")
@click.option(
    "--prefix-cache-bytes",
    type=click.IntRange(min=0),
    default=1 << 30,
    show_default=True,
    help="Memory for states of earlier texts; 0 keeps none.",
)
@click.option("--cache-rows", type=click.IntRange(min=1), help="Of all answers together.  [default: every context]")
@click.option("--draft-tokens", type=DraftTokensParameter(), help="Where a request does not say.  [default: 3]")
@click.option("--draft-model", type=click.Path(path_type=Path), help="Bundle of a smaller model that drafts.")
@click.option("--max-new-tokens-limit", type=click.IntRange(min=1), help="Most tokens that a request may ask for.")
@click.option(
    "--max-body-bytes",
    type=click.IntRange(min=1),
    default=8 << 20,
    show_default=True,
    help="Largest body of a request.",
)
@click.option(
    "--body-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    help="Seconds in which a body has to come.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds after which an answer is given up."
)
@click.option("--api-key", envvar="MTP_API_KEY", help="What requests to /v1 must carry; also MTP_API_KEY.")
@click.option("--quiet", is_flag=True, help="No line for each request.")
@engine_options
def serve(
    bundle: Path | None,
    host: str,
    port: int,
    served_name: str | None,
    slots: int | None,
    max_queue: int,
    prefix_cache_bytes: int,
    cache_rows: int | None,
    draft_tokens: DraftTokens | None,
    draft_model: Path | None,
    max_new_tokens_limit: int | None,
    max_body_bytes: int,
    body_timeout: float,
    timeout: float | None,
    api_key: str | None,
    quiet: bool,
    engine: EngineOptions,
) -> None:
    """Serve a bundle to clients of the OpenAI API, several requests at once. SIGTERM drains; a second one stops."""
    require_libraries()
    _require_sense(timeout, body_timeout, {"--api-key": api_key, "--served-name": served_name})
    from mtp_serving.openai.options import ServeOptions
    from mtp_serving.openai.server import Server, open_socket
    from mtp_serving.openai.service import Service

    directory = find_bundle(bundle)
    name = served_name or directory.resolve().name
    most = 2 * (max_queue + 64)
    options = ServeOptions(
        name, api_key, max_body_bytes, max_new_tokens_limit, timeout, draft_tokens, body_timeout, max_open=most
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("mtp_serving.access").setLevel(logging.WARNING if quiet else logging.INFO)
    with open_socket(host, port) as listening:
        # What a request gets that names nothing has to be possible.
        usual = request_from({"prompt_ids": [0], "draft_tokens": draft_tokens}, "the command line")
        model = open_model(directory, engine, [usual], draft_model)
        service = Service(model, options, BatchOptions(slots, max_queue, None, prefix_cache_bytes, cache_rows))
        if draft_tokens == AUTO:
            print("reading or measuring what cycles of several answers cost", file=sys.stderr, flush=True)
            model.auto.measure(service.scheduler.slots)
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        said = f"serving {name} at {address}, {service.scheduler.slots} answers at once"
        asyncio.run(Server(service).run(listening, ready=lambda: print(said, flush=True)))


def _require_sense(timeout: float | None, body_timeout: float, texts: dict[str, str | None]) -> None:
    """Refuse what no request could be served with, or what serves all where only some were meant."""
    for option, seconds in (("--timeout", timeout), ("--body-timeout", body_timeout)):
        if seconds is not None and not math.isfinite(seconds):
            raise RequestError(f"{option} is {seconds}, expected a finite number of seconds.")
    for option, text in texts.items():
        if text == "":
            raise RequestError(f"{option} is empty; give a text, or leave it out (MTP_API_KEY too).")


def require_libraries() -> None:
    """Refuse to start without the server's libraries.

    Raises:
        RequestError: one of them is not installed.
    """
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise RequestError(
            f"`mtp-run serve` needs {', '.join(missing)}, not installed here; install what it needs with "
            "`pip install 'mtp-export[serve]'`."
        )
