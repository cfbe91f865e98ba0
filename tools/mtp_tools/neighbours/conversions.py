"""What each engine makes of the checkpoint, once, and the settings with which its worker loads it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_engines.errors import MtpError
from mtp_exporter import BuildOptions, build
from mtp_runtime.request import AUTO, DraftTokens
from mtp_tools.neighbours.checkpoints import write_copy, write_vision_copy
from mtp_tools.neighbours.environments import ENVIRONMENTS, LLAMA_CPP, build_llama_cpp, make_environment, run
from mtp_tools.neighbours.protocol import NeighbourError

_HERE = Path(__file__).resolve().parent
_FAILED = "its converter failed"


@dataclass(frozen=True)
class Job:
    """What is measured and where files go.

    Attributes:
        draft_tokens: values of K above 0, and `auto`, which is only ours.
        acceptance: share of our drafts that are made right by force; None leaves our head's as they are.
        draft_vocab: ids that our head drafts from; None for all.
        seed: of forced drafts.
    """

    checkpoint: Path
    work: Path
    threads: int
    max_model_len: int
    draft_tokens: tuple[DraftTokens, ...]
    acceptance: float | None
    draft_vocab: int | None
    seed: int

    @property
    def fixed_draft_tokens(self) -> tuple[DraftTokens, ...]:
        """What a neighbour may be asked for."""
        return tuple(width for width in self.draft_tokens if width != AUTO)


@dataclass(frozen=True)
class Prepared:
    """A worker that can be started: its interpreter and its settings."""

    python: Path
    settings: dict[str, Any]


Prepare = Callable[[Job, str], Prepared]


def prepare_ours(job: Job, weights: str) -> Prepared:
    """Build a bundle, or find it built from the same checkpoint with the same options."""
    out = job.work / "bundles" / weights
    options = BuildOptions(
        str(job.checkpoint), out, weights, max_model_len=job.max_model_len, draft_vocab=job.draft_vocab
    )
    try:
        build(options)
    except MtpError as error:
        raise NeighbourError(f"the bundle cannot be built: {error}") from error
    settings = {"bundle": str(out), "threads": job.threads, "draft_tokens": job.draft_tokens}
    return Prepared(Path(sys.executable), settings | {"acceptance": job.acceptance, "seed": job.seed})


def prepare_transformers(job: Job, weights: str) -> Prepared:
    """The checkpoint as it is."""
    python = make_environment(ENVIRONMENTS["transformers"], job.work)
    return Prepared(python, {"model": str(_copy(job)), "dtype": weights, "threads": job.threads})


def prepare_llama_cpp(job: Job, weights: str) -> Prepared:
    """GGUF in float32, and from that the other formats with llama.cpp's own defaults."""
    # Its converter needs what transformers needs, its server nothing.
    python = make_environment(ENVIRONMENTS["transformers"], job.work)
    source, programs = build_llama_cpp(job.work, python)
    models = job.work / "models"
    plain, wanted = models / "f32.gguf", models / f"{weights}.gguf"
    script = str(_HERE / "converters" / "llama_gguf.py")
    _made(plain, job, lambda out: [str(python), script, str(source), str(_copy(job)), str(out)])
    quantise = [str(programs / "llama-quantize"), str(plain)]
    _made(wanted, job, lambda out: [*quantise, str(out), weights, str(job.threads)])
    return Prepared(
        python,
        {
            "server": str(programs / "llama-server"),
            "release": LLAMA_CPP,
            "model": str(wanted),
            "max_model_len": job.max_model_len,
            "draft_tokens": job.fixed_draft_tokens,
            "threads": job.threads,
        },
    )


def prepare_onnxruntime_genai(job: Job, weights: str) -> Prepared:
    """Its own builder, without the MTP head: on a CPU it exports one and drafts nothing with it."""
    python = make_environment(ENVIRONMENTS["onnxruntime-genai"], job.work)
    model = job.work / "models" / f"onnxruntime-genai-{weights}"
    builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-m", str(_copy(job)), "-p", weights, "-e", "cpu"]
    _made(model, job, lambda out: [*builder, "-o", str(out), "--extra_options", "exclude_mtp=true"])
    config = model / "genai_config.json"
    found = json.loads(config.read_text(encoding="utf-8"))
    found["model"]["decoder"]["session_options"]["intra_op_num_threads"] = job.threads
    config.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return Prepared(python, {"model": str(model)})


def prepare_openvino(job: Job, weights: str) -> Prepared:
    """optimum-intel's export, twice: the language model alone, and with a tower of images, which its MTP needs."""
    python = make_environment(ENVIRONMENTS["openvino"], job.work)
    models = job.work / "models"
    export = [str(python), "-m", "optimum.commands.optimum_cli", "export", "openvino", "--weight-format", weights]
    if weights == "int4":
        # A product of the positions cannot be grouped, and the exporter gives up unless it may leave it.
        export += ["--group-size-fallback", "ignore"]
    text = _copy(job, text_only=True)
    plain, drafting = models / f"openvino-{weights}", models / f"openvino-vision-{weights}"
    _made(plain, job, lambda out: [*export, "--task", "text-generation-with-past", "--model", str(text), str(out)])
    settings = {"model": str(plain), "threads": job.threads, "draft_tokens": job.fixed_draft_tokens}
    if job.fixed_draft_tokens:
        whole = write_vision_copy(job.checkpoint, models / "checkpoint-vision")
        _made(drafting, job, lambda out: [*export, "--task", "image-text-to-text", "--model", str(whole), str(out)])
        settings["mtp_model"] = str(drafting)
    return Prepared(python, settings)


def _copy(job: Job, *, text_only: bool = False) -> Path:
    """The checkpoint as the neighbours read it."""
    name = "checkpoint-text" if text_only else "checkpoint"
    return write_copy(job.checkpoint, job.work / "models" / name, text_only=text_only)


def _made(wanted: Path, job: Job, command: Callable[[Path], list[str]]) -> None:
    """Run the command that makes a file or folder, unless it is there; one that fails leaves nothing behind.

    Raises:
        NeighbourError: the command failed.
    """
    if wanted.exists():
        return
    unfinished = wanted.with_name(f"unfinished-{wanted.name}")
    log = job.work / "logs" / f"making-{wanted.name}.log"
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.unlink(missing_ok=True)
    run(command(unfinished), f"{_FAILED} ({log} has what it wrote)", log)
    unfinished.rename(wanted)
