"""The command: how it starts, drains and stops, and that other commands need none of its libraries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from mtp_runtime import Model
from mtp_serving import cli
from tests.serving.server import PATIENCE, wait_until
from tests.support import command_refused, refused, run_command

PROMPT = "The function returns"
LONG = {"model": "bundle", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@contextmanager
def started(bundle: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process of its own, and its address; it is ended by its own id whatever happens."""
    command = [str(Path(sys.executable).with_name("mtp-run")), "serve", str(bundle), "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving "), (line, process.poll())
        yield process, line.split(" at ")[1].split(",")[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def status(url: str) -> int:
    """Of readiness."""
    return httpx.get(f"{url}/health/ready", timeout=PATIENCE).status_code


def test_a_signal_lets_what_is_under_way_finish(carried: Model) -> None:
    bundle = carried.bundle.directory
    expected = carried.complete(prompt=PROMPT, max_new_tokens=200, ignore_eos=True).text
    with started(bundle) as (process, url), ThreadPoolExecutor(1) as pool:
        assert status(url) == 200
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=PATIENCE)
        running = 'mtp:num_requests_running{model_name="bundle"} 1.0'
        wait_until(lambda: running in httpx.get(f"{url}/metrics").text, "it runs")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(url) == 503, "it is not ready")
        assert not answer.done(), "control: readiness went before the answer was there"
        refusal = httpx.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE)
        assert refusal.status_code == 503
        assert "shutting down" in refusal.json()["error"]["message"]
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        assert answer.result().json()["choices"][0]["text"] == expected
        assert process.wait(PATIENCE) == 0
        _, log = process.communicate()
    assert "ended=length prompt=3 cached=0 generated=200" in log
    assert "refused status=503 POST /v1/completions" in log
    assert "Traceback" not in log


def test_a_second_signal_gives_up_what_is_left(carried: Model) -> None:
    with started(carried.bundle.directory) as (process, url), ThreadPoolExecutor(1) as pool:
        body = {**LONG, "prompt": [PROMPT] * 16}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=PATIENCE)
        running = 'mtp:num_requests_running{model_name="bundle"} 4.0'
        wait_until(lambda: running in httpx.get(f"{url}/metrics").text, "they run")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(url) == 503, "it is not ready")
        process.send_signal(signal.SIGINT)
        choices = answer.result().json()["choices"]
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        assert "cancelled" in {choice["stop_reason"] for choice in choices}
        assert process.wait(PATIENCE) == 0


def test_options_of_the_command(carried: Model) -> None:
    options = (
        "--served-name",
        "mine",
        "--slots",
        "2",
        "--max-new-tokens-limit",
        "4",
        "--quiet",
        "--max-body-bytes",
        "500",
    )
    bundle = carried.bundle.directory
    with started(bundle, *options, "--draft-tokens", "1", MTP_API_KEY="secret") as (process, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["mine"]
            extra: dict[str, Any] = {"extra_body": {"speculative_stats": True}}
            answer = client.completions.create(model="mine", prompt=PROMPT, max_tokens=4, temperature=0, **extra)
            assert set(answer.speculative_stats["draft_tokens_chosen"]) <= {"0", "1"}  # type: ignore[attr-defined]
            with pytest.raises(openai.BadRequestError, match="at most 4"):
                client.completions.create(model="mine", prompt=PROMPT, max_tokens=5)
            with pytest.raises(openai.APIStatusError, match="500 bytes"):
                client.completions.create(model="mine", prompt="a" * 600)
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        _, log = process.communicate()
    assert log == ""


def test_what_the_command_refuses(carried: Model) -> None:
    bundle = carried.bundle.directory
    command_refused(run_command("mtp-run", "serve", bundle, "--slots", "9"), "9", "4")
    shared = ("serve", bundle, "--cache-rows", "64")
    command_refused(run_command("mtp-run", *shared), "cache_rows is 64", "a cache of its own", "--backend torch")
    command_refused(run_command("mtp-run", "serve", bundle, "--host", "192.0.2.1"), "192.0.2.1", "--host")
    command_refused(run_command("mtp-run", "serve", bundle, "--port", "70000"), "--port", code=2)
    command_refused(run_command("mtp-run", "serve", bundle, "--timeout", "0"), "--timeout", code=2)
    command_refused(run_command("mtp-run", "serve", bundle / "nothing"), "nothing")


def test_without_its_libraries_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "uvicorn" else object())
    with refused("needs uvicorn", "mtp-export[serve]"):
        cli.require_libraries()


def test_other_commands_import_none_of_them() -> None:
    named = "('fastapi', 'uvicorn', 'prometheus_client')"
    code = f"import sys, mtp_serving.cli\nprint(*(name for name in {named} if name in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert shown.stdout.split() == []
    control = code.replace("mtp_serving.cli", "mtp_serving.openai.server")
    shown = subprocess.run(
        [sys.executable, "-c", control], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert set(shown.stdout.split()) == {"fastapi", "uvicorn", "prometheus_client"}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--api-key", ""], ["--api-key is empty"]),
        (["--served-name", ""], ["--served-name is empty"]),
        (["--timeout", "nan"], ["--timeout is nan", "finite"]),
        (["--body-timeout", "inf"], ["--body-timeout is inf", "finite"]),
        (["--draft-tokens", "99"], ["draft_tokens is 99"]),
    ],
)
def test_what_no_request_could_use_is_refused_at_the_start(
    carried: Model, options: list[str], parts: list[str]
) -> None:
    place = str(carried.bundle.directory)
    result = CliRunner().invoke(cli.serve, [place, "--port", "0", *options], standalone_mode=False)
    assert result.exception is not None
    assert all(part in str(result.exception) for part in parts), result.exception
