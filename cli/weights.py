"""``zoo verify``, ``zoo doctor`` and ``zoo diff``: what weights are worth, before somebody relies on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._options import Json
from ._output import print_json, print_table, set_up_notes

if TYPE_CHECKING:
    from zoo.diff import Difference

__all__ = ["diff", "doctor", "verify"]

_SHOWN = 10  # keys on the screen; --json has all
_MODEL = "org/name\\[@tag], a catalog name, a folder, a file of weights, a run, url:ADDRESS, timm:NAME ..."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]


def verify(model: Model, as_json: Json = False) -> None:
    """Check everything about a model that can be checked (exit code 1 if something is wrong)."""
    set_up_notes()
    from zoo.verify import verify as check

    found = check(model, progress=not as_json)
    if as_json:
        print_json(found.to_json())
    else:
        print(f"{model}: {found.kind}")
        for each in found.checks:
            print(f"  {each.state:<12}  {each.name:<14}  {each.detail}")
        counts = [
            (state, sum(check.state == state for check in found.checks)) for state in _states(found.checks)
        ]
        print(", ".join(f"{count} {state}" for state, count in counts))
    if not found.passed:
        raise typer.Exit(1)


def _states(checks: list[Any]) -> list[str]:
    return list(dict.fromkeys(sorted((check.state for check in checks), key=lambda state: state != "FAILED")))


def doctor(
    model: Annotated[str, typer.Argument(metavar="FILE|MODEL", help=_MODEL)], as_json: Json = False
) -> None:
    """Say what a file or model is, whether it was ever trained, and how to use it.

    The exit code is 1 if it can't be loaded or holds NaN or infinity.
    """
    set_up_notes()
    from zoo.doctor import UNREADABLE, diagnose

    found = diagnose(model, progress=not as_json)
    if as_json:
        print_json(found)
    else:
        for title, rows in _sections(found).items():
            print(title)
            for label, text in rows:
                print(f"  {label:<14}  {text}")
        print("Conclusion")
        for sentence in found["conclusion"]:
            print(f"  {sentence}")
    if found["verdict"] in (UNREADABLE, "broken"):
        raise typer.Exit(1)


def _sections(found: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    sections = {"What it is": [*_file_rows(found["file"]), *_model_rows(found)]}
    if found["verdict"] == "unreadable":
        return {title: rows for title, rows in sections.items() if rows}
    how, load = found["preprocessing"], found["load"]
    sections["What its weights tell"] = _sign_rows(found["signs"])
    sections["Images"] = [
        (
            "size",
            f"shorter side to {how['resize']} ({how['interpolation']}), central {how['crop']} x {how['crop']}",
        ),
        ("values", f"0..1, normalised by mean {how['mean']} and std {how['std']}"),
        ("from", how["from"]),
    ]
    if found["verdict"] == "broken":
        return sections
    sections["To use it"] = [
        *(("Python", line) for line in load["python"]),
        *(("command line", line) for line in load["commands"]),
    ]
    return sections


def _file_rows(file: dict[str, Any] | None) -> list[tuple[str, str]]:
    if file is None:
        return []
    names = ", ".join(file["globals"]) or "no names"
    verdict = f"; refused: {', '.join(file['refused'])}" if file["refused"] else ""
    rows = [
        ("file", file["path"]),
        ("container", f"{file['container']}, {file['size']:,} bytes"),
        ("SHA-256", file["sha256"]),
        ("it mentions", names + verdict),
    ]
    return rows + [("entry", entry) for entry in file["entries"]]


def _model_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    if found["verdict"] == "unreadable":
        return []
    facts = [f"{key} {value}" for key, value in found["facts"].items() if not isinstance(value, dict)]
    said = ", ".join(fact for fact in facts if "/" not in fact)[:300]
    size = f"{found['parameters']:,} parameters, {found['num_features']} features"
    return [
        ("layout", f"{found['format']}: {found['what']}"),
        ("network", f"{found['network']}, {size}"),
        ("method", found["method"]),
        ("licence", found["licence"]),
        ("tensors", found["account"]),
        *([("it says", said)] if said else []),
    ]


def _sign_rows(signs: dict[str, Any]) -> list[tuple[str, str]]:
    norms = signs["norms"]
    rows = [
        (
            "norms",
            f"{norms}: {norms - signs['initial_scales']} scales and {norms - signs['initial_statistics']} statistics "
            f"are not as at the start; {signs['batches']} batches counted",
        ),
        (
            "convolutions",
            f"{signs['convolutions']}: {signs['like_new']} have the spread of a new network's; of "
            f"{signs['examined']} spectra {signs['beyond_edge']} are beyond the edge of random numbers",
        ),
    ]
    for stage in signs["stages"]:
        edge = (
            "" if stage["edge"] is None else f", largest singular value {stage['edge']:.2f} x a random one's"
        )
        state = "as in a new network" if stage["initial"] else "changed"
        rows.append((stage["name"], f"{state}; spread {stage['spread']:.2f} x a new one's{edge}"))
    return rows


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=_MODEL)],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Compare two models, tensor by tensor (exit code 0: identical, 1: different)."""
    set_up_notes()
    from zoo.diff import diff as compare

    found = compare(first, second, progress=not as_json)
    if as_json:
        print_json(found.to_json())
    else:
        _print_difference(found)
    if not found.identical:
        raise typer.Exit(1)


def _print_difference(found: Difference) -> None:
    print(f"A is {found.first}, weights {found.sha256[0]}")
    print(f"B is {found.second}, weights {found.sha256[1]}")
    if found.identical:
        print("They are identical.")
        return
    for title, names in (("Only in A", found.only_first), ("Only in B", found.only_second)):
        _print_some(title, names)
    _print_some("Other shapes", [f"{name}: {a} in A, {b} in B" for name, a, b in found.shapes])
    _print_some("Other types", [f"{name}: {a} in A, {b} in B" for name, a, b in found.dtypes])
    rows = [vars(part) for part in found.parts]
    print_table("Values by stage", ["name", "equal", "different", "max_abs", "relative", "cosine"], rows)
    if found.worst:
        worst = [vars(each) for each in found.worst]
        print_table("Tensors that differ most", ["name", "max_abs", "relative", "cosine"], worst)
    if found.known:
        known = [{"key": key, "A": _text(a), "B": _text(b)} for key, (a, b) in found.known.items()]
        print_table("What they say of themselves", ["key", "A", "B"], known)


def _print_some(title: str, lines: list[str]) -> None:
    if lines:
        print(f"{title} ({len(lines)})")
        for line in lines[:_SHOWN]:
            print(f"  {line}")
        if len(lines) > _SHOWN:
            print(f"  ... and {len(lines) - _SHOWN} more")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
