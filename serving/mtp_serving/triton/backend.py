"""What Triton's Python backend calls: load, execute, unload. See `mtp_serving.triton.repository` for the model.py."""

from __future__ import annotations

import ctypes
import json
import logging
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mtp_engines.backends import EngineOptions
from mtp_engines.bundle import open_bundle
from mtp_engines.errors import BundleError, MtpError
from mtp_runtime.api import load
from mtp_runtime.batching.scheduler import BatchOptions, Scheduler
from mtp_serving.triton.config import problems, settings_from
from mtp_serving.triton.engine_loop import EngineLoop
from mtp_serving.triton.metrics import Metrics
from mtp_serving.triton.repository import BUNDLE, CONFIG

_LOG = logging.getLogger(__name__)


class Backend:
    """One instance of the model; the class in model.py names the module that Triton gives it."""

    utils: ClassVar[Any]
    """`triton_python_backend_utils`, which exists inside of Triton only."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside model.py.

        Raises:
            TritonModelException: with a sentence for everything that is wrong.
        """
        try:
            self._loop = _open(self.utils, args)
        except MtpError as error:
            raise self.utils.TritonModelException(str(error)) from error
        self._loop.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; their responses come later, through their senders."""
        self._loop.put(requests)

    def finalize(self) -> None:
        """Give up what is open and end."""
        self._loop.close()


def _open(utils: Any, args: dict[str, str]) -> EngineLoop:
    place = Path(args["model_repository"])
    bundle = place / args["model_version"] / BUNDLE
    require_readable_arrays(utils)
    config, manifest = json.loads(args["model_config"]), open_bundle(bundle).manifest
    if wrong := problems(config, manifest):
        raise BundleError(f"{place / CONFIG} and {bundle} do not fit: {' '.join(wrong)}")
    settings = settings_from(config)
    if args["model_instance_kind"] == "GPU":
        choose_gpu(int(args["model_instance_device_id"]), os.environ)
    options = EngineOptions(settings.threads, settings.backend, settings.device)  # type: ignore[arg-type]  # Checked.
    model = load(bundle, options=options)
    for note in model.notes:
        _LOG.warning("%s", note)
    labels = {"model": args["model_name"], "version": args["model_version"], "instance": args["model_instance_name"]}
    metrics = Metrics(utils, labels)
    batching = BatchOptions(
        slots=settings.slots,
        max_queue=settings.max_queue,
        prefix_bytes=settings.prefix_cache_bytes,
        cache_rows=settings.cache_rows,
    )
    return EngineLoop(utils, Scheduler(model, batching, metrics), metrics)


def choose_gpu(number: int, environment: MutableMapping[str, str]) -> None:
    """Let this process, which is one instance, see one GPU, before a library looks for them.

    `number` is Triton's, which counts those that CUDA_VISIBLE_DEVICES names, if it is set.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)


def require_readable_arrays(utils: Any) -> None:
    """Refuse a Python backend that misreads the arrays of this NumPy: it would give wrong token ids, and never say so.

    Triton up to 24.10 was built for NumPy 1 only. May go once that is too old to be met.

    Raises:
        BundleError: it does.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return
    probe = _Capsule(np.array([7, 8, 9], np.int64))
    read = utils.Tensor.from_dlpack("probe", probe).as_numpy().tolist()
    if read != [7, 8, 9]:
        raise BundleError(
            f"this Triton server cannot read arrays of NumPy {np.__version__}: [7, 8, 9] reads as {read}. Use Triton "
            "24.11 or newer, or NumPy 1.26.4 in the model's interpreter."
        )


class _Capsule:
    """An array that is handed over as DLPack; the capsule is never freed, since Triton leaves one that NumPy cannot."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
        return capsule

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()
