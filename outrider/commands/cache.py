"""`outrider cache`: lists, checks, exports, imports and clears a disk cache (`--disk-cache-dir`)."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.commands.flag_values import whole_number
from outrider.commands.parser import UsageError
from outrider.core.foreign_text import printable
from outrider.core.lazy_exports import LateModule
from outrider.core.status_line import status_line

if TYPE_CHECKING:
    from outrider.features.tiers.disk import archive
    from outrider.features.tiers.disk.archive import DomainSummary
else:
    archive = LateModule("outrider.features.tiers.disk.archive")

HELP = "list, check, export, import or clear a disk cache"
ACTIONS = ("list", "stats", "check", "export", "import", "clear")
USAGE = "|".join(ACTIONS) + " FOLDER [flags]"
EXAMPLES = """examples:
  outrider cache list ~/outrider-cache
  outrider cache stats ~/outrider-cache --json
  outrider cache check ~/outrider-cache --remove
  outrider cache export ~/outrider-cache --model 3fa9 --file smollm2.tar
  outrider cache import ~/other-cache --file smollm2.tar --size 20G
  outrider cache clear ~/outrider-cache --model 3fa9

The folder is that of --disk-cache-dir. It holds what prompts were computed to, and so does an export: keep both as
private as the prompts. Engines may use the folder meanwhile. `check` reads every object and verifies its checksum:
status 1 if some are damaged; engines never use those. A model is named by the first digits of its digest, or by its
name if only one entry has it.
"""
UNLIMITED = 1 << 62
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
SPANS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("folder", metavar="FOLDER", help="the folder of --disk-cache-dir")
    parser.add_argument("--model", metavar="DIGEST", help="one model, by its digest or name (default: all; for export "
                                                          "the only one)")
    parser.add_argument("--file", metavar="FILE", help="the tar file to write or read (export, import)")
    parser.add_argument("--size", type=whole_number, metavar="BYTES",
                        help="most bytes of the folder, as 20G (import; default: no limit until an engine starts)")
    parser.add_argument("--remove", action="store_true", help="delete damaged objects (check)")
    parser.add_argument("--json", action="store_true", help="print JSON (list, stats, check)")


def run(args: argparse.Namespace) -> int:
    _check_flags(args)
    match args.action:
        case "list":
            return _list(args)
        case "stats":
            return _stats(args)
        case "check":
            return _check(args)
        case "export":
            return _export(args)
        case "import":
            return _import(args)
        case _:
            return _clear(args)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that the action would ignore, and ask for those that it needs."""
    uses = {"model": ("list", "stats", "export", "clear"), "file": ("export", "import"), "size": ("import",),
            "remove": ("check",), "json": ("list", "stats", "check")}
    for flag, actions in uses.items():
        if getattr(args, flag) and args.action not in actions:
            raise UsageError(f"--{flag} has no effect on {args.action}: leave it out")
    if args.action in uses["file"] and args.file is None:
        raise UsageError(f"{args.action} needs --file, a tar file")


def _list(args: argparse.Namespace) -> int:
    found = _found(args)
    if args.json:
        print(json.dumps([_as_dict(summary) for summary in found], indent=2))
        return 0
    total = sum(summary.num_bytes for summary in found)
    print(f"{args.folder}: {_count(len(found), 'model')}, {_size(total)}")
    for summary in found:
        name = printable(str(summary.about.get("model", "unknown model")))
        print(f"  {summary.domain.hex()[:12]}  {name}  {_count(summary.num_objects, 'object')}  "
              f"{_size(summary.num_bytes)}  {_age(summary.newest)}")
    return 0


def _stats(args: argparse.Namespace) -> int:
    found = _found(args)
    with archive.open_folder(args.folder) as (folder, log):
        rows = {"bytes on the disk": log.disk_bytes, "bytes free on the disk": folder.free_bytes(),
                "objects": len(log.index.stored), "objects being written": len(log.index.reserved),
                "bytes of the log": log.num_bytes, "processes that use it": len(folder.live_writers())}
    if args.json:
        print(json.dumps({"folder": rows, "models": [_as_dict(summary) for summary in found]}, indent=2))
        return 0
    for name, value in rows.items():
        print(f"{name + ':':26} {value:,}" + (f" ({_size(value)})" if name.startswith("bytes") else ""))
    for summary in found:
        print(f"\n{summary.domain.hex()}")
        for name, text in _details(summary):
            print(f"  {name + ':':24} {text}")
    return 0


def _details(summary: DomainSummary) -> list[tuple[str, str]]:
    about = [(printable(str(name)), printable(str(value))) for name, value in summary.about.items()]
    return [*about, ("objects", f"{summary.num_objects:,}"), ("bytes on the disk", _size(summary.num_bytes)),
            ("kept longest", f"{summary.num_kept:,}"), ("held by sessions", f"{summary.num_pinned:,}"),
            ("last use", _age(summary.newest)), ("oldest", _age(summary.oldest))]


def _check(args: argparse.Namespace) -> int:
    with status_line(f"reading {args.folder}"), archive.open_folder(args.folder) as (folder, log):
        result = archive.check_objects(folder, log, remove=args.remove)
    if args.json:
        print(json.dumps({"whole": result.num_whole, "damaged": dict(result.damaged)}, indent=2))
    else:
        for path, reason in result.damaged:
            print(f"{path}: damaged ({reason})" + (", removed" if args.remove else ""))
        print(f"{_count(result.num_whole, 'object')} whole, {len(result.damaged)} damaged")
    return int(bool(result.damaged) and not args.remove)


def _export(args: argparse.Namespace) -> int:
    output = Path(args.file)
    if output.exists():
        raise UsageError(f"{output} exists already: name a new file")
    with archive.open_folder(args.folder) as (folder, log):
        chosen = archive.find_domain(archive.summaries(folder, log), args.model)
        with status_line(f"writing {output}"):
            count = archive.export_domain(folder, log, chosen.domain, output)
    print(f"{output}: {_count(count, 'object')} of {chosen.domain.hex()[:12]}, {_size(output.stat().st_size)}")
    return 0


def _import(args: argparse.Namespace) -> int:
    source = Path(args.file)
    if not source.is_file():
        raise UsageError(f"there is no file {source}: give a file that `outrider cache export` has written")
    with status_line(f"reading {source}"):
        count, num_damaged = archive.import_archive(Path(args.folder), source, args.size or UNLIMITED)
    print(f"{args.folder}: {_count(count, 'new object')}" + (f", {num_damaged} damaged ones left out" if num_damaged
                                                             else ""))
    return int(num_damaged > 0)


def _clear(args: argparse.Namespace) -> int:
    with archive.open_folder(args.folder) as (folder, log):
        domain = None
        if args.model is not None:
            domain = archive.find_domain(archive.summaries(folder, log), args.model).domain
        count = archive.clear(folder, log, domain)
    print(f"{args.folder}: {_count(count, 'object')} deleted")
    return 0


def _found(args: argparse.Namespace) -> list[DomainSummary]:
    with archive.open_folder(args.folder) as (folder, log):
        found = archive.summaries(folder, log)
        return found if args.model is None else [archive.find_domain(found, args.model)]


def _as_dict(summary: DomainSummary) -> dict[str, object]:
    return {"digest": summary.domain.hex(), "about": summary.about, "objects": summary.num_objects,
            "kept": summary.num_kept, "pinned": summary.num_pinned, "bytes": summary.num_bytes,
            "last_use": summary.newest, "oldest": summary.oldest}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _size(number: float) -> str:
    for unit in UNITS[:-1]:
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} {UNITS[-1]}"


def _age(used: float | None) -> str:
    if used is None:
        return "never used"
    seconds = max(0.0, time.time() - used)
    for length, name in SPANS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{seconds:.0f} seconds ago"
