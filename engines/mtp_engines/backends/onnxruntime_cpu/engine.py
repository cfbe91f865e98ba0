"""The ONNX Runtime CPU engine: its sessions over one weight file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import onnx_ir as ir

from mtp_engines.backends.onnxruntime_cpu.huge_pages import in_huge_pages
from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.backends.onnxruntime_cpu.sessions import Sessions, load_graph, open_head, open_session
from mtp_engines.checks import refuse_cache_rows
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.cores import physical_cores, read_cpuinfo
from mtp_engines.errors import RequestError
from mtp_engines.kernels.packing import packed_matrices
from mtp_engines.lowering.attention_trial import attention_that_splits
from mtp_engines.lowering.commit import commit_model
from mtp_engines.lowering.heads import head_models, without_head
from mtp_engines.lowering.last_row import only_last_row
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_engines.lowering.own_kernels import commit_model as own_commit_model
from mtp_engines.lowering.pending import defer_commits


class CpuEngine:
    """Backbone, vocabulary head, MTP head and commit as sessions; see `mtp_engines.engine.Engine`.

    One backbone session serves prefill, decode and verify, and one head session serves target and
    draft, so every matrix is packed once. `kernels` says whose kernels run: "own, vnni" or "own, avx2", those of
    `mtp_engines.kernels`, or "onnxruntime".
    """

    runs_on = "cpu"

    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits,
        numerics: str,
        backbone: Path,
        mtp: tuple[Path, ...],
        threads: int = 0,
    ) -> None:
        """Open the canonical graphs of a bundle and lower them.

        Args:
            spec: what the graphs were built from.
            limits: what the bundle was built for.
            numerics: the manifest's promise, kept where ONNX Runtime's attention allows it.
            backbone: canonical backbone graph; its weight file lies beside it.
            mtp: canonical graph of every depth of the draft head, in the same folder.
            threads: intra-op threads of each session; 0 takes one for each physical core.

        Raises:
            BundleError: ONNX Runtime refuses a graph.
        """
        self.spec, self.limits = spec, limits
        workers = threads or physical_cores(read_cpuinfo())
        packed = packed_matrices(workers)
        self.numerics = "near-tie" if packed is None and attention_that_splits(spec) else numerics
        self.kernels = "onnxruntime" if packed is None else f"own, {packed.used}"

        session = partial(open_session, folder=backbone.parent, threads=threads)

        def lowered(model: ir.Model) -> ir.Model:
            return lower(model, threads=workers, packed=packed)

        # A further depth reads every row of the one before it; behind a single one, drafts go on from the last row.
        heads = [without_head(load_graph(path)) for path in mtp]
        heads = [only_last_row(heads[0])] if len(heads) == 1 else heads
        commits = _commit_models(spec, own=packed is not None)
        with in_huge_pages():
            # The head first: its matrix is the largest, and while it is packed it is in memory twice.
            head = open_head(head_models(load_graph(backbone), packed), session)
            own = mtp[:1] if spec.mtp and spec.mtp.own_head else ()
            own_heads = [open_head(head_models(load_graph(path), packed), session) for path in own]
            self.sessions = Sessions(
                backbone=session(defer_commits(lowered(without_head(load_graph(backbone))))),
                head=head,
                commit=session(commits[0]) if commits else None,
                commit_all=session(commits[1]) if len(commits) > 1 else None,
                mtp=tuple(session(lowered(model)) for model in heads),
                draft_head=next(iter(own_heads), None),
            )

    def sequences(self, batch: int = 1, cache_rows: int | None = None) -> CpuSequences:
        """Fresh state for `batch` sequences that run together; each has a cache of its own."""
        refuse_cache_rows(cache_rows)
        if not 1 <= batch <= self.limits.max_batch_size:
            raise RequestError(
                f"{batch} sequences were asked for at once, this bundle was built for 1 to "
                f"{self.limits.max_batch_size}. Build it again with --max-batch-size {max(batch, 1)}."
            )
        return CpuSequences(self.spec, self.limits, self.sessions, batch)


def _commit_models(spec: ModelSpec, *, own: bool) -> list[ir.Model]:
    """Graphs of a commit: one for any kept rows, and where ONNX Runtime computes one for a lone sequence's."""
    if not any(spec.delta_layers()):
        return []
    return [own_commit_model(spec)] if own else [commit_model(spec, masked=masked) for masked in (True, False)]
