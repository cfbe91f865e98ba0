"""A real Triton server on this machine's CPU: streams, batches, cancellation, errors, metrics, a kill, a restart."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from mtp_runtime import Model
from mtp_serving.triton.config import Settings
from mtp_serving.triton.repository import write_repository
from mtp_tools.triton_server.fetch import Installation, ServerError, fetch
from mtp_tools.triton_server.server import Server, running
from tests.support import build_bundle, load_model

ROOT = Path(__file__).resolve().parents[3]
CARRIED = ROOT / "checkpoints" / "tiny-mtp"
SLOTS, WAIT_S = 4, 60
TEXTS = ("The cat", "def main", "import os\n", "Once upon a time", "In this", "for i in", "A list of", "x = ")


@pytest.fixture(scope="session")
def installation(request: pytest.FixtureRequest) -> Installation:
    """The server; downloaded into pytest's cache the first time."""
    try:
        return fetch(Path(request.config.cache.mkdir("triton-server")))
    except ServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The carried checkpoint, for four at once."""
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    return build_bundle(CARRIED, out, max_model_len=256, max_batch_size=SLOTS)


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Model:
    """The same bundle without a server."""
    return load_model(bundle)


@pytest.fixture(scope="module")
def repository(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with that model, called `m`."""
    out = tmp_path_factory.mktemp("repository")
    write_repository(bundle, out, Settings(threads=1), "m", link=True)
    return out


@pytest.fixture(scope="module")
def server(installation: Installation, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The running server."""
    with running(installation, repository, tmp_path_factory.mktemp("log") / "server.log") as one:
        yield one


@dataclass
class Answer:
    """What came for one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    statistics: dict[str, Any] = field(default_factory=dict)
    responses: int = 0
    error: str = ""

    @property
    def ended(self) -> bool:
        return bool(self.reason or self.error)


class Client:
    """One gRPC stream."""

    def __init__(self, server: Server) -> None:
        self._client = grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        self._came: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.answers: dict[str, Answer] = {}
        self._client.start_stream(lambda result, error: self._came.put((result, error)))

    def send(self, name: str, text: str | None = None, ids: Sequence[int] | None = None, **options: Any) -> None:
        """Send a request under a name."""
        tensors = [] if ids is None else [_tensor("input_ids", np.array(ids, np.int64), "INT64")]
        for tensor, value in (("text_input", text), ("options", json.dumps(options))):
            if value is not None:
                tensors.append(_tensor(tensor, np.array([value.encode()], np.object_), "BYTES"))
        self.send_tensors(name, tensors)

    def send_tensors(self, name: str, tensors: list[grpc.InferInput]) -> None:
        """Send a request of tensors."""
        self.answers[name] = Answer()
        self._client.async_stream_infer("m", tensors, request_id=name)

    def receive(self) -> None:
        """Take one response."""
        result, error = self._came.get(timeout=WAIT_S)
        if error is not None:
            name = next(name for name, answer in self.answers.items() if not answer.ended)
            self.answers[name].error = error.message()
            return
        answer = self.answers[result.get_response().id]
        answer.responses += 1
        answer.text += result.as_numpy("text_output").item().decode()
        answer.token_ids += result.as_numpy("output_ids").tolist()
        answer.reason = result.as_numpy("finish_reason").item().decode()
        if answer.reason:
            answer.statistics = json.loads(result.as_numpy("statistics").item())
            final = result.get_response().parameters.get("triton_final_response")
            assert final is None or final.bool_param

    def wait(self) -> dict[str, Answer]:
        """Until every request has ended."""
        while not all(answer.ended for answer in self.answers.values()):
            self.receive()
        return self.answers

    def close(self, *, cancel: bool = False) -> None:
        """End the stream, with what still runs in it if it is to be cancelled."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@contextlib.contextmanager
def client_of(server: Server) -> Iterator[Client]:
    """A stream for one block."""
    client = Client(server)
    try:
        yield client
    finally:
        client.close()


def _tensor(name: str, array: np.ndarray, kind: str) -> grpc.InferInput:
    tensor = grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def post(server: Server, path: str, **body: Any) -> str:
    """A POST to the model over HTTP."""
    url = f"http://127.0.0.1:{server.http}/v2/models/m/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def metrics_of(server: Server) -> dict[str, float]:
    """Sums of our own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=WAIT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    sums: dict[str, float] = {}
    for sample in samples:
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return {name: value for name, value in sums.items() if name.startswith("mtp:")}


GENERATED = "mtp:generation_tokens_total"


def tokens_until_idle(server: Server, before: float) -> float:
    """Tokens since `before`, once there are some and nothing runs or waits any more."""
    end = time.monotonic() + WAIT_S
    while True:
        found = metrics_of(server)
        busy = found.get("mtp:num_requests_running", 0) + found.get("mtp:num_requests_waiting", 0)
        if not busy and found.get(GENERATED, 0) > before:
            return found[GENERATED] - before
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_stream_gives_text_and_ids_as_they_come(server: Server, alone: Model) -> None:
    expected = alone.complete(prompt="Once upon a time", max_new_tokens=40)
    with client_of(server) as client:
        client.send("one", "Once upon a time", max_new_tokens=40)
        answer = client.wait()["one"]
    assert answer.responses > 5
    assert (answer.text, answer.token_ids) == (expected.text, list(expected.token_ids))
    assert answer.reason == expected.finish_reason
    assert answer.statistics["usage"]["completion_tokens"] == 40
    assert answer.statistics["stats"]["accepted"] == expected.stats.accepted > 0


def test_64_interleaved_requests_are_those_of_the_model_alone(server: Server, alone: Model) -> None:
    """Mixed lengths, K, texts, ids and sampling, sent in four bursts over two streams; and slots were shared."""
    requests: list[dict[str, Any]] = []
    for number in range(64):
        options: dict[str, Any] = {"max_new_tokens": 1 + 7 * number % 24, "draft_tokens": number % 5}
        if number % 3 == 0:
            options |= {"temperature": 0.8, "seed": number}
        if number % 2:
            requests.append({"prompt": TEXTS[number % len(TEXTS)], **options})
        else:
            requests.append({"prompt_ids": [1 + 3 * number, 7, 50 + number], **options})
    with client_of(server) as first, client_of(server) as second:
        for number, request in enumerate(requests):
            client = (first, second)[number % 2]
            named = dict(request)
            client.send(str(number), named.pop("prompt", None), named.pop("prompt_ids", None), **named)
            if number % 16 == 15:
                client.receive()
        answers = first.wait() | second.wait()
    assert len(answers) == 64
    different = 0
    for number, request in enumerate(requests):
        answer, expected = answers[str(number)], alone.complete(**request)
        assert answer.token_ids == list(expected.token_ids), request
        assert (answer.text, answer.reason) == (expected.text, expected.finish_reason)
        different += answer.token_ids != answers["1"].token_ids
    assert different > 50, "control: answers of other requests would be noticed"


def test_http_generates_at_once_and_as_a_stream(server: Server, alone: Model) -> None:
    expected = alone.complete(prompt="The cat", max_new_tokens=12, draft_tokens=2)
    whole = json.loads(post(server, "generate", text_input="The cat", max_new_tokens=12, draft_tokens=2, stream=False))
    assert (whole["text_output"], whole["output_ids"]) == (expected.text, list(expected.token_ids))
    assert whole["finish_reason"] == "length"
    lines = post(server, "generate_stream", text_input="The cat", max_new_tokens=12, draft_tokens=2).splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert len(parts) > 2
    assert "".join(part["text_output"] for part in parts) == expected.text
    assert [part["finish_reason"] for part in parts] == [""] * (len(parts) - 1) + ["length"]


def test_a_cancelled_stream_frees_its_slots(server: Server, alone: Model) -> None:
    """Six long answers are cancelled in the middle: four had slots, two waited."""
    before = metrics_of(server).get(GENERATED, 0)
    client = Client(server)
    for number in range(6):
        client.send(str(number), ids=[13 + number], max_new_tokens=250, draft_tokens=0, ignore_eos=True)
    for _ in range(8):
        client.receive()
    client.close(cancel=True)
    expected = alone.complete(prompt="The cat", max_new_tokens=5)
    whole = json.loads(post(server, "generate", text_input="The cat", max_new_tokens=5, stream=False))
    assert whole["output_ids"] == list(expected.token_ids)
    assert tokens_until_idle(server, before) < 6 * 250, "they did not run to their ends"


def test_a_closed_http_connection_frees_its_slot(server: Server) -> None:
    """SV-01, the HTTP half: the client goes away after the first event."""
    before = metrics_of(server).get(GENERATED, 0)
    body = json.dumps({"text_input": "The cat", "max_new_tokens": 250, "draft_tokens": 0, "ignore_eos": True}).encode()
    head = f"POST /v2/models/m/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(4096)
    assert tokens_until_idle(server, before) < 250


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "needs exactly one of prompt"),
        ({"text": "a", "ids": [1]}, "needs exactly one of prompt"),
        ({"ids": [1 << 40]}, "token id 1099511627776"),
        ({"ids": []}, "the prompt has no tokens"),
        ({"text": "a", "temprature": 1}, "'temprature'"),
        ({"text": "a", "draft_tokens": 99}, "draft_tokens is 99"),
    ],
)
def test_a_wrong_request_is_refused_and_others_go_on(server: Server, options: dict[str, Any], part: str) -> None:
    with client_of(server) as client:
        client.send("bad", **options)
        assert part in client.wait()["bad"].error
        client.send("good", "The cat", max_new_tokens=3)
        assert len(client.wait()["good"].token_ids) == 3


def test_what_triton_itself_refuses(server: Server) -> None:
    """One response from a model that gives several, a model that is not there, and a tensor of another kind."""
    client = http.InferenceServerClient(f"127.0.0.1:{server.http}")
    ids = http.InferInput("input_ids", [2], "INT64")
    ids.set_data_from_numpy(np.array([1, 2], np.int64))
    for name, part in (("m", "decoupled"), ("absent", "absent")):
        with pytest.raises(InferenceServerException, match=part):
            client.infer(name, [ids])
    client.close()
    with client_of(server) as stream:
        stream.send_tensors("bad", [_tensor("input_ids", np.array([1, 2], np.int32), "INT32")])
        assert "expects 'INT64'" in stream.wait()["bad"].error


def test_http_tells_what_a_request_does_wrong(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "generate", text_input="The cat", max_new_tokens=9, temprature=1)
    assert "temprature" in caught.value.read().decode()
    caught.value.close()


def test_the_client_of_the_documentation_prints_the_answer(
    server: Server, alone: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code.replace("localhost:8001", f"127.0.0.1:{server.grpc}").replace('"tiny-mtp"', '"m"'), {})
    assert capsys.readouterr().out == alone.complete(prompt="Once upon a time", max_new_tokens=40).text


def test_metrics_follow_what_was_sent(server: Server) -> None:
    before = metrics_of(server)
    with client_of(server) as client:
        for number in range(5):
            client.send(str(number), ids=[20 + number, 3], max_new_tokens=11, draft_tokens=3, ignore_eos=True)
        answers = client.wait()
    time.sleep(0.2)  # The last numbers follow the last response.
    grown = {name: value - before.get(name, 0.0) for name, value in metrics_of(server).items()}
    assert grown[GENERATED] == 55
    assert grown["mtp:prompt_tokens_total"] == 10
    assert grown["mtp:request_success_total"] == 5
    drafted = sum(answer.statistics["stats"]["drafted"] for answer in answers.values())
    assert grown["mtp:spec_decode_num_draft_tokens_total"] == drafted > 0
    assert grown["mtp:time_to_first_token_seconds_count"] == 5
    responses = sum(answer.responses for answer in answers.values())
    assert 0 < grown["mtp:inter_token_latency_seconds_count"] <= responses
    for name in ("time_to_first_token", "inter_token_latency"):
        seconds = grown[f"mtp:{name}_seconds_sum"] / grown[f"mtp:{name}_seconds_count"]
        assert 0 < seconds < WAIT_S, "control: neither zeros nor milliseconds"
        # Every bucket holds those before it, so all together hold a value as often as buckets end above it.
        assert grown[f"mtp:{name}_seconds_bucket"] > grown[f"mtp:{name}_seconds_count"]


def test_a_server_can_be_killed_and_started_again(
    installation: Installation, repository: Path, alone: Model, tmp_path: Path
) -> None:
    """A kill in the middle of an answer leaves no process and no shared memory, and the next server is right."""
    first = Server(installation, repository, tmp_path / "first.log")
    try:
        first.wait()
        client = Client(first)
        client.send("long", "The cat", max_new_tokens=200, ignore_eos=True)
        client.receive()
        (model,) = first.stubs
        assert Path(f"/proc/{model}").exists(), "control: the model has a process of its own"
    finally:
        first.stop(kill=True)
    client.close(cancel=True)
    end = time.monotonic() + WAIT_S
    while first.stubs:
        assert time.monotonic() < end
        time.sleep(0.05)
    expected = alone.complete(prompt="The cat", max_new_tokens=9)
    with running(installation, repository, tmp_path / "second.log") as second:
        whole = json.loads(post(second, "generate", text_input="The cat", max_new_tokens=9, stream=False))
    assert whole["output_ids"] == list(expected.token_ids)


def test_a_wrong_configuration_is_told_when_the_server_starts(
    installation: Installation, bundle: Path, tmp_path: Path
) -> None:
    """SV-05, by the server itself."""
    model = write_repository(bundle, tmp_path / "r", Settings(), "m", link=True)
    config = model / "config.pbtxt"
    config.write_text(config.read_text().replace("decoupled: true", "decoupled: false"))
    with (
        pytest.raises(ServerError, match=r"decoupled is false, expected true"),
        running(installation, tmp_path / "r", tmp_path / "log"),
    ):
        pass


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="the fault needs NumPy 2")
def test_arrays_that_this_server_would_misread_are_refused_when_it_starts(
    installation: Installation, repository: Path, tmp_path: Path
) -> None:
    """Without NumPy 1 in front; that the others pass shows that the refusal is not for everybody."""
    bare = replace(installation, interpreter=Path(sys.prefix))
    with (
        pytest.raises(ServerError, match=r"\[7, 8, 9\] reads as \[7, 7, 7\]"),
        running(bare, repository, tmp_path / "log"),
    ):
        pass


def test_the_command_starts_a_server_and_ends_it(
    request: pytest.FixtureRequest, installation: Installation, repository: Path
) -> None:
    """`python -m mtp_tools.triton_server`, ended as an operator would."""
    cache = request.config.cache.mkdir("triton-server")
    command = [sys.executable, "-m", "mtp_tools.triton_server", str(repository), "--cache", str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            shown = dict(process.stdout.readline().split() for _ in range(3))
            with urllib.request.urlopen(f"{shown['HTTP']}/v2/models/m/ready", timeout=WAIT_S) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{shown['HTTP']}/v2/models/m/ready", timeout=WAIT_S)
