"""One line for each request that was answered, given up or refused, by the logger `mtp_serving.access`."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import quote

from mtp_runtime.stats import merge
from mtp_serving.openai.answers import Answers
from mtp_serving.openai.errors import ApiError

LOGGER = logging.getLogger("mtp_serving.access")


def write_line(identity: str, answers: Answers) -> None:
    """Id, how its answers ended, tokens, acceptance and times of a request whose answers have ended."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    finished = list(answers.finished.values())
    stats = merge([one.stats for one in finished])
    rate = stats.as_dict()["acceptance_rate"]
    LOGGER.info(
        "%s ended=%s prompt=%d cached=%d generated=%d drafted=%d accepted=%d acceptance=%s first_s=%s total_s=%.3f",
        identity,
        "+".join(sorted({one.finish_reason for one in finished})) or "error",
        sum(one.prompt_tokens for one in finished),
        sum(one.cached_tokens for one in finished),
        sum(len(one.token_ids) for one in finished),
        stats.drafted,
        stats.accepted,
        "-" if rate is None else f"{rate:.3f}",
        "-" if answers.first is None else f"{answers.first - answers.begun:.3f}",
        asyncio.get_running_loop().time() - answers.begun,
    )


def write_refusal(method: str, path: str, error: ApiError) -> None:
    """Why a request was not answered; on one line, whatever its sender wrote."""
    LOGGER.info("refused status=%d %s %s: %s", error.status, method, quote(path), " ".join(str(error).split()))
