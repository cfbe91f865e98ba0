"""The same answers on many machines: a callable class for Ray Data, Dask, Spark or a plain pool of processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.backends.options import EngineOptions
from mtp_runtime.api import load
from mtp_runtime.batching.scheduler import BatchOptions, Scheduler
from mtp_serving.batch.answers import answers

Column = npt.NDArray[Any]


class Answers:
    """Loads a bundle once for a worker, then answers batches of requests; see `mtp_serving.batch.answers`.

    In Ray Data it is what `map_batches` takes: `data.map_batches(Answers, fn_constructor_args=(bundle,), ...)`.
    """

    def __init__(
        self,
        bundle: str | Path,
        defaults: Mapping[str, Any] | None = None,
        slots: int | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        """Open the bundle, which has to be there on every machine.

        Args:
            bundle: directory that `mtp-export build` wrote.
            defaults: fields of requests that a request may override.
            slots: answers at once; None takes what the bundle was built for.
            options: backend, device and threads.

        Raises:
            BundleError: it cannot be opened.
        """
        self._defaults = dict(defaults or {})
        self._scheduler = Scheduler(load(bundle, options=options), BatchOptions(slots))
        self._scheduler.start()

    def __call__(self, batch: Mapping[str, Column]) -> dict[str, Column]:
        """Answer a batch.

        Args:
            batch: columns; `request` has one request a row, as JSON.

        Returns:
            The columns, and `answer`: for each row what `mtp-run batch` would write, as JSON.
        """
        found = dict(answers(self._scheduler, enumerate(batch["request"].tolist()), self._defaults))
        texts = [json.dumps(found[row], ensure_ascii=False) for row in range(len(found))]
        return {**batch, "answer": np.array(texts, object)}

    def close(self) -> None:
        """End the scheduler's thread; a worker that ends needs not call it."""
        self._scheduler.close(drain=False)
