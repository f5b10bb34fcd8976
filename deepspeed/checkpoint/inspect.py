# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed.checkpoint.inspect DIR``: what is in a checkpoint directory, and is it whole.

    DIR                a directory with tags, or one tag folder
    --tag TAG          only this tag          --params       list parameters and shapes
    --json             for scripts            --no-verify    do not read the files to compare hashes

What must hold: read-only; a damaged tag is reported, not raised; exit code 0 iff every tag shown is whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.export import format_size
from deepspeed.checkpoint.folder import TagFolder, open_tag, resolve_tag
from deepspeed.checkpoint.reader import ZeroSource
from deepspeed.checkpoint.universal import UniversalSource, is_universal
from deepspeed.checkpoint.zero3_format import INTERNAL_KEYS, LATEST, STRUCTURAL_KEYS, shard_names
from deepspeed.errors import CheckpointError

__all__ = ["describe", "describe_tag", "main"]

_OWN_KEYS = STRUCTURAL_KEYS | INTERNAL_KEYS | {"global_samples", "sparse_tensor_module_names"}


def describe(directory: Path, *, tag: str | None = None, verify: bool = True) -> dict[str, Any]:
    """Facts about a directory of tags (or one tag folder) as JSON-able values.

    ``latest`` is the tag that the file names, None without one; ``latest_error`` says what is wrong with it.
    """
    directory = directory.absolute()
    if shard_names(directory) or is_universal(directory):
        return {"directory": str(directory), "latest": None, "tags": [describe_tag(directory, verify=verify)]}
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    facts: dict[str, Any] = {"directory": str(directory), "latest": None}
    try:
        facts["latest"] = resolve_tag(directory, None)
    except CheckpointError as error:
        facts["latest_error"] = str(error)
    names = [tag] if tag is not None else [entry.name for entry in sorted(directory.iterdir()) if _maybe_tag(entry)]
    facts["tags"] = [describe_tag(directory / name, verify=verify) for name in names]
    return facts


def _maybe_tag(entry: Path) -> bool:
    if not entry.is_dir() or entry.name.startswith("."):
        return False
    return bool(shard_names(entry)) or is_universal(entry) or (entry / "ds_manifest.json").exists()


def describe_tag(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """Facts about one tag; ``complete`` is False and ``problem`` says why where it cannot be loaded."""
    facts: dict[str, Any] = {"tag": folder.name, "complete": False}
    try:
        if is_universal(folder):
            source = UniversalSource(folder)
            source.prepare(list(source.shapes), 1, 0)
            facts.update(layout="universal", verified="no manifest", **_contents(source.model, source))
        else:
            opened = open_tag(folder)
            facts.update(_files(opened))
            facts["verified"] = _verified(opened, verify)
            zero = ZeroSource(opened, opened.ranks[0])
            for rank in opened.ranks:
                zero.optim(rank)
            facts.update(_contents(zero.model(opened.ranks[0]), zero))
        facts["complete"] = True
    except (CheckpointError, OSError, ValueError) as error:
        facts["problem"] = str(error)
    return facts


def _files(opened: TagFolder) -> dict[str, Any]:
    names = [name for rank in opened.ranks for name in opened.files_of(rank)]
    manifest = opened.manifest
    return {
        "layout": "zero3",
        "world_size": opened.world_size,
        "ranks": list(opened.ranks),
        "writer": manifest.writer if manifest is not None else None,
        "nonce": manifest.nonce if manifest is not None else None,
        "files": {name: (opened.path / name).stat().st_size for name in names},
    }


def _verified(opened: TagFolder, verify: bool) -> str:
    if opened.manifest is None:
        return "no manifest"
    if not verify:
        return "not asked"
    opened.verify([name for rank in opened.ranks for name in opened.files_of(rank)])
    return "sha256"


def _contents(model: dict[str, Any], source: ZeroSource | UniversalSource) -> dict[str, Any]:
    frozen = set(source.shapes) - source.trainable
    return {
        "global_steps": model.get("global_steps"),
        "ds_version": model.get("ds_version"),
        "sub_groups": len(source.layout.groups),
        "param_groups": len(source.group_hyper_parameters()),
        "trainable_elements": sum(source.shapes[name].numel() for name in source.trainable),
        "frozen_elements": sum(source.shapes[name].numel() for name in frozen),
        "parameters": {name: list(shape) for name, shape in source.shapes.items()},
        "frozen": sorted(frozen),
        "tied": dict(source.aliases),
        "buffers": {name: list(buffer.shape) for name, buffer in source.buffers.items()},
        "client_state": sorted(str(key) for key in set(model) - _OWN_KEYS),
    }


def _table(facts: dict[str, Any], with_params: bool) -> str:
    rows = [("", "tag", "state", "ranks", "step", "parameters", "size", "hashes")]
    notes: list[str] = []
    for tag in facts["tags"]:
        count = f"{len(tag.get('parameters', ()))} ({_elements(tag)})" if "parameters" in tag else "-"
        size = format_size(sum(tag["files"].values())) if "files" in tag else "-"
        rows.append(
            (
                "*" if tag["tag"] == facts["latest"] else "",
                tag["tag"],
                "complete" if tag["complete"] else "BROKEN",
                str(tag.get("world_size", "any" if tag.get("layout") == "universal" else "-")),
                str(tag.get("global_steps", "-")),
                count,
                size,
                tag.get("verified", "-"),
            )
        )
        if "problem" in tag:
            notes.append(f"{tag['tag']}: {tag['problem']}")
        if with_params:
            notes += _parameter_lines(tag)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if facts["latest"] is None:
        notes.insert(0, facts.get("latest_error", f"no '{LATEST}' file"))
    else:
        notes.insert(0, f"* is what '{LATEST}' names")
    return "\n".join([facts["directory"], *lines, *notes])


def _elements(tag: dict[str, Any]) -> str:
    total = tag["trainable_elements"] + tag["frozen_elements"]
    return f"{total:,} elements" + (f", {tag['frozen_elements']:,} frozen" if tag["frozen_elements"] else "")


def _parameter_lines(tag: dict[str, Any]) -> list[str]:
    frozen = set(tag.get("frozen", ()))
    lines = [f"{tag['tag']}:"]
    for name, shape in tag.get("parameters", {}).items():
        lines.append(f"  {name}  {tuple(shape)}{'  frozen' if name in frozen else ''}")
    lines += [f"  {alias}  = {owner}" for alias, owner in tag.get("tied", {}).items()]
    lines += [f"  {name}  {tuple(shape)}  buffer" for name, shape in tag.get("buffers", {}).items()]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 iff there is a tag and every tag shown is whole, 1 otherwise, 2 for a wrong directory."""
    parser = argparse.ArgumentParser(prog="deepspeed.checkpoint.inspect", description="Show what a checkpoint holds.")
    parser.add_argument("directory", type=Path, help="directory with tags, or one tag folder")
    parser.add_argument("--tag", help="only this tag")
    parser.add_argument("--params", action="store_true", help="list parameters and shapes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not compare hashes")
    args = parser.parse_args(argv)
    try:
        facts = describe(args.directory, tag=args.tag, verify=args.verify)
    except OSError as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    print(json.dumps(facts, indent=1) if args.json else _table(facts, args.params))
    return 0 if facts["tags"] and all(tag["complete"] for tag in facts["tags"]) else 1


if __name__ == "__main__":
    sys.exit(main())
