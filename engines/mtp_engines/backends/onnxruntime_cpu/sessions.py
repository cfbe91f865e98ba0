"""Sessions of ONNX Runtime over graphs whose weights stay in one file of the bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir
import onnxruntime as ort

from mtp_engines.errors import BundleError
from mtp_engines.kernels.library import path_of_kernels
from mtp_engines.lowering.heads import HeadModels
from mtp_engines.lowering.own_kernels import KERNELS
from mtp_plugins.graph import IR_VERSION, OPSET


class HeadSessions(NamedTuple):
    """The sessions of a vocabulary head; see `mtp_engines.lowering.heads.HeadModels`."""

    choose: ort.InferenceSession
    score: ort.InferenceSession


def open_head(models: HeadModels, opened: Callable[[ir.Model], ort.InferenceSession]) -> HeadSessions:
    """Open one session, or two that read the same packed matrix."""
    score = opened(models.score)
    return HeadSessions(score if models.choose is models.score else opened(models.choose), score)


@dataclass(frozen=True)
class Sessions:
    """The sessions of one engine.

    The commits are None without recurrent layers: `commit` keeps as many rows as each sequence of a batch says,
    `commit_all` all that a lone sequence gives it, without masks; our own kernels need none, and no second one. `mtp`
    has one session for each trained depth of the draft head; `draft_head` is None where the head chooses over the
    target's vocabulary.
    """

    backbone: ort.InferenceSession
    head: HeadSessions
    commit: ort.InferenceSession | None
    commit_all: ort.InferenceSession | None
    mtp: tuple[ort.InferenceSession, ...]
    draft_head: HeadSessions | None


PROVIDERS = ["CPUExecutionProvider"]
_FATAL_ONLY = 4


def load_graph(path: Path) -> ir.Model:
    """Read a canonical graph; its weights stay where they are.

    Raises:
        BundleError: it is no ONNX file, or of a newer ONNX than this release writes.
    """
    try:
        model = ir.load(path)
    except Exception as error:  # Protobuf and the reader raise classes of their own.
        raise BundleError(f"{path} cannot be read as an ONNX graph. Build the bundle again.") from error
    opset = model.opset_imports.get("", OPSET)
    if model.ir_version > IR_VERSION or opset > OPSET:
        raise BundleError(
            f"{path} has ONNX IR version {model.ir_version} and opset {opset}; this release reads up to "
            f"{IR_VERSION} and "
            f"{OPSET}, which ONNX Runtime {ort.__version__} runs. Install a newer release, or build the bundle again."
        )
    if any(node.domain == KERNELS for node in ir.traversal.RecursiveGraphIterator(model.graph)):
        raise BundleError(f"{path} holds nodes of {KERNELS}, which only a graph in memory may have. Build it again.")
    return model


def open_session(
    model: ir.Model,
    folder: Path,
    *,
    threads: int = 0,
    prepack: bool = True,
    providers: Sequence[Any] = PROVIDERS,
    weights: Mapping[str, ort.OrtValue] | None = None,
) -> ort.InferenceSession:
    """Open a lowered model.

    Args:
        model: its external tensors lie in `folder`.
        folder: directory of the weight file.
        threads: intra-op threads; 0 takes one for each physical core.
        prepack: False leaves the weights mapped, not copied: slower, and rows then depend on their number.
        providers: where it runs, as ONNX Runtime takes them.
        weights: values in memory of external tensors, by name; they must outlive the session.

    Raises:
        BundleError: this ONNX Runtime refuses the graph.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _FATAL_ONLY
    # The arena keeps the greatest prompt's buffers in every session: 140 MB at the 0.8B shape.
    options.enable_cpu_mem_arena = False
    # One block for all buffers of a run finds no hole among freed ones, so the process grows with every width of a run.
    options.enable_mem_pattern = False
    # Nodes in the order of the graph: by default those that only an output needs run last, and keep what they read.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    # The sessions of one engine take turns; a pool that keeps spinning would slow the next one down.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    kernels = path_of_kernels()
    if kernels is not None:
        options.register_custom_ops_library(str(kernels))
    if weights:
        options.add_external_initializers(list(weights), list(weights.values()))
    payload = ir.to_proto(model).SerializeToString()
    try:
        return ort.InferenceSession(payload, options, providers=list(providers))
    except Exception as error:  # ONNX Runtime raises a class of its own for each status code.
        reason = str(error).splitlines()[0]
        raise BundleError(
            f"ONNX Runtime {ort.__version__} cannot open the graph {model.graph.name!r} of {folder}: {reason}. "
            "Build the bundle again with this version, or install the version that its manifest names."
        ) from error
