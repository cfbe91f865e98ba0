"""Stands in for `triton_python_backend_utils`, which exists inside of Triton only, and records what is asked of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.bundle import open_bundle
from mtp_serving.triton.backend import Backend
from mtp_serving.triton.config import Settings, config_of

WAIT_S = 60


class TritonError(Exception):
    """An error with a code."""

    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = 1, 2, 3, 4

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self.text, self.code = message, code


class Tensor:
    """A name and an array."""

    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        self._name, self._array = name, array

    @classmethod
    def from_dlpack(cls, name: str, given: Any) -> Tensor:
        return cls(name, np.from_dlpack(given))

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        return self._array


class Response:
    """Tensors or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.error = error
        self._values = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}

    @property
    def ids(self) -> list[int]:
        return self._values["output_ids"].tolist()

    @property
    def statistics(self) -> dict[str, Any]:
        return json.loads(self.word("statistics"))

    def word(self, name: str) -> str:
        """A text."""
        return self._values[name].item().decode()


class MetricFamily:
    """Metrics by their labels, kept in the class."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    values: dict[str, dict[tuple[tuple[str, str], ...], float]]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.kind = name, kind
        assert description.endswith(".")
        self.values.setdefault(name, {})

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:  # noqa: N802
        assert (buckets is not None) == (self.kind == MetricFamily.HISTOGRAM)
        assert buckets is None or sorted(buckets) == buckets
        return Metric(self, tuple(sorted(labels.items())))


class Metric:
    """One number."""

    def __init__(self, family: MetricFamily, key: tuple[tuple[str, str], ...]) -> None:
        self._family, self._key = family, key
        family.values[family.name].setdefault(key, 0.0)

    def increment(self, value: float) -> None:
        assert self._family.kind == MetricFamily.COUNTER
        assert value >= 0
        self._family.values[self._family.name][self._key] += value

    def set(self, value: float) -> None:
        assert self._family.kind == MetricFamily.GAUGE
        self._family.values[self._family.name][self._key] = value

    def observe(self, value: float) -> None:
        """Counted; the values themselves are not kept."""
        assert self._family.kind == MetricFamily.HISTOGRAM
        assert value >= 0
        self._family.values[self._family.name][self._key] += 1


class Utils:
    """The module."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    TritonError, Tensor, InferenceResponse = TritonError, Tensor, Response

    class TritonModelException(Exception):  # noqa: N818
        """What a model raises."""

    def __init__(self) -> None:
        self.MetricFamily = type("MetricFamily", (MetricFamily,), {"values": {}})


class Sender:
    """Records responses; `cancelled` sees itself, `send_fails` the number of the call."""

    def __init__(self, cancelled: Callable[[Sender], bool], send_fails: Callable[[int], bool]) -> None:
        self.sent: list[tuple[Response, int]] = []
        self.ended, self.threads = threading.Event(), set[int]()
        self._cancelled, self._fails, self.calls = cancelled, send_fails, 0

    def send(self, response: Response, flags: int = 0) -> None:
        self.threads.add(threading.get_ident())
        self.calls += 1
        assert isinstance(response, Response)
        if self._fails(self.calls):
            raise RuntimeError("the pipe is gone")
        if self.ended.is_set():
            raise RuntimeError("the sender has been closed")
        self.sent.append((response, flags))
        if flags & Utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.ended.set()

    def is_cancelled(self) -> bool:
        self.threads.add(threading.get_ident())
        return self._cancelled(self)

    @property
    def responses(self) -> list[Response]:
        """All of them, once the final one is there."""
        assert self.ended.wait(WAIT_S), "the sender was never told that it is finished"
        return [response for response, _ in self.sent]

    @property
    def tokens(self) -> list[int]:
        """Of all responses so far."""
        return [token for response, _ in self.sent if response.error is None for token in response.ids]


class TritonRequest:
    """A request, made of options under their names."""

    def __init__(
        self,
        text: str | bytes | None = None,
        ids: Sequence[int] | None = None,
        *,
        parameters: dict[str, Any] | None = None,
        microseconds: int = 0,
        cancelled: Callable[[Sender], bool] = lambda sender: False,
        send_fails: Callable[[int], bool] = lambda call: False,
        **options: Any,
    ) -> None:
        self.sender = Sender(cancelled, send_fails)
        self._tensors, self._parameters, self._microseconds = [], parameters or {}, microseconds
        if text is not None:
            self._tensors.append(Tensor("text_input", _text(text)))
        if ids is not None:
            self._tensors.append(Tensor("input_ids", np.array(ids, np.int64)))
        if options:
            self._tensors.append(Tensor("options", _text(json.dumps(options))))

    def inputs(self) -> list[Tensor]:
        self.sender.threads.add(threading.get_ident())
        return self._tensors

    def parameters(self) -> str:
        return json.dumps(self._parameters) if self._parameters else ""

    def timeout(self) -> int:
        return self._microseconds

    def get_response_sender(self) -> Sender:
        self.sender.threads.add(threading.get_ident())
        return self.sender


def _text(text: str | bytes) -> npt.NDArray[np.object_]:
    return np.array([text.encode() if isinstance(text, str) else text], np.object_)


def arguments(bundle: Path, place: Path, **settings: Any) -> dict[str, str]:
    """What Triton gives `initialize`, with the bundle where the repository has it."""
    version = place / "1"
    version.mkdir(parents=True)
    (version / "bundle").symlink_to(bundle)
    config = config_of(Settings(threads=1, **settings), open_bundle(bundle).manifest)
    return {
        "model_config": json.dumps(config),
        "model_repository": str(place),
        "model_version": "1",
        "model_name": "m",
        "model_instance_name": "m_0_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


@contextmanager
def loaded(given: dict[str, str], utils: Utils | None = None) -> Iterator[Backend]:
    """A model between `initialize` and `finalize`."""
    model = type("TritonPythonModel", (Backend,), {"utils": utils or Utils()})()
    model.initialize(given)
    try:
        yield model
    finally:
        model.finalize()


def ask(model: Backend, *requests: TritonRequest) -> list[list[Response]]:
    """Send requests in one `execute`, and wait for all of their responses."""
    assert model.execute(list(requests)) is None
    return [request.sender.responses for request in requests]
