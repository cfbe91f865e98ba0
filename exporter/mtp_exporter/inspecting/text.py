"""An inspection as lines for people."""

from __future__ import annotations

from typing import Any

_SHOWN_K = ("1", "2", "3", "7")


def as_text(report: dict[str, Any]) -> str:
    """The report of `inspect_checkpoint`, a line a fact."""
    lines = [
        f"checkpoint     {report['directory']}",
        f"family         {report['family'] or 'unknown'} (model_type {report['model_type']!r})",
        *_model(report["model"]),
        *_mtp(report["mtp"]),
        _ends(report["end_tokens"]),
        f"parameters     {report['parameters'] / 1e6:,.1f} M",
        *(f"dtypes         {group}: {_counts(counts)}" for group, counts in report["dtypes"].items()),
        *_files(report["files"]),
        *_memory(report["memory"]),
        *(f"ignored        {count} {reason}" for reason, count in report["ignored"].items()),
        *(f"note           {text}" for text in report["notes"]),
        f"can be built   {'yes' if report['can_build'] else 'no'}",
        *(f"problem        {problem}" for problem in report["problems"]),
    ]
    return "\n".join(lines)


def _model(model: dict[str, Any] | None) -> list[str]:
    if model is None:
        return []
    return [
        f"layers         {model['layers']}, {model['layer_pattern']} (L gated delta, F {_attention(model['mixers'])})",
        *_experts(model),
        f"width          hidden {model['hidden_size']}, vocabulary {model['vocab_size']}, "
        f"head {'tied to the embedding' if model['tied_head'] else 'untied'}, {model['max_position']} positions",
    ]


def _attention(mixers: dict[str, Any]) -> str:
    return "latent attention" if "latent_attention" in mixers else "full attention"


def _experts(model: dict[str, Any]) -> list[str]:
    moe = model["mlps"].get("moe")
    if moe is None:
        return []
    shared = " and a shared one" if moe["shared_intermediate_size"] else ""
    groups = f", by {moe['groups']} groups" if moe["groups"] > 1 else ""
    layers = model["moe_layers"]
    return [
        f"experts        {moe['top_k']} of {moe['experts']}{shared} in {layers} of {model['layers']} layers{groups}"
    ]


def _mtp(mtp: dict[str, Any] | None) -> list[str]:
    if mtp is None:
        return []
    if not mtp["tensors_expected"]:
        return ["MTP head       none in this family"]
    declared = "nothing" if mtp["layers_declared"] is None else mtp["layers_declared"]
    lines = [f"MTP head       {mtp['tensors_found']} of {mtp['tensors_expected']} tensors, config declares {declared}"]
    if mtp["first_missing"] and mtp["tensors_found"]:
        lines.append(f"MTP head       first missing: {mtp['first_missing']}")
    if mtp["hidden_tap"]:
        depths = f", {mtp['depths']} trained depths" if mtp["depths"] > 1 else ""
        lines.append(f"MTP head       hidden tap {mtp['hidden_tap']}, concatenation {mtp['concat']}{depths}")
    return lines


def _ends(tokens: list[dict[str, Any]]) -> str:
    found = ", ".join(f"{token['id']} ({' and '.join(token['sources'])})" for token in tokens)
    return f"end tokens     {found or 'none'}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in counts.items())


def _files(files: dict[str, Any]) -> list[str]:
    state = "complete" if files["complete"] else "INCOMPLETE"
    declared = "" if files["bytes_declared"] is None else f", the index says {files['bytes_declared']:,}"
    return [
        f"files          {state}: {files['tensors']} tensors, {files['bytes']:,} bytes{declared}",
        *(f"missing        {shard['file']} with {shard['tensors']} tensors" for shard in files["missing"]),
        *(f"not in index   {name}" for name in files["not_in_index"]),
    ]


def _memory(memory: dict[str, Any] | None) -> list[str]:
    if memory is None:
        return []
    factors = memory["replay_factor_bytes_by_draft_tokens"]
    by_k = ", ".join(f"K={k}: {factors[k]:,}" for k in _SHOWN_K)
    return [
        f"weights        {memory['weight_bytes'] / 1e9:.2f} GB in fp32, on disk and in memory",
        f"KV cache       {memory['kv_bytes_per_token']:,} bytes a token",
        f"state          {memory['state_bytes_per_sequence']:,} bytes a sequence",
        f"replay factors {by_k} bytes a sequence",
    ]
