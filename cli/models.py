"""``zoo publish``, ``list``, ``show``, ``tag``, ``rm`` and ``pull``: models and where they live."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._options import Json, Out
from ._output import print_json, print_table, set_up_notes

if TYPE_CHECKING:
    from zoo.weights.catalog import Card

log = logging.getLogger("zoo")

__all__ = ["list_models", "publish", "pull", "rm", "show", "tag"]

Name = Annotated[str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="A model of the local hub.")]
Force = Annotated[bool, typer.Option("--force", help="Move a tag that points elsewhere.")]


def publish(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[REF]", help="A run's folder (default: the newest run); with --to any model."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="ADDRESS",
            help="Publish elsewhere: hf:ORG/NAME (the Hugging Face hub), s3://BUCKET/FOLDER/ORG/NAME, file://...",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="ORG/NAME", help="Default: me/<recipe>."),
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="A fixed name for this revision, e.g. v1.")] = None,
    licence: Annotated[
        str | None,
        typer.Option("--licence", "--license", help="Of the weights, e.g. cc-by-nc-4.0."),
    ] = None,
    with_results: Annotated[
        bool, typer.Option("--with-results", help="Put the transfer results of these weights into the card.")
    ] = False,
    results_dir: Annotated[
        str | None,
        typer.Option(
            "--results", metavar="DIR", help="Where results are (default: $ZOO_RESULTS, else ./results)."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --to: make a private repository, if it has to be made.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --to: check everything, and send nothing.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Publish a backbone, to the local hub or elsewhere (--to): whole, verified, documented."""
    set_up_notes()
    from zoo.pretrain.publish import newest_run, publish_run, read_run

    path = newest_run() if run is None else run
    if to is not None:
        _refuse(name, "--name", "the name is part of --to hf:ORG/NAME")
        found = _finder(results_dir) if with_results else None
        settings = {"tag": tag, "licence": licence, "private": private, "force": force, "dry_run": dry_run}
        _publish_to(str(path), to, found, settings, as_json)
        return
    _refuse(private, "--private", "it goes with --to hf:ORG/NAME")
    _refuse(dry_run, "--dry-run", "it goes with --to hf:ORG/NAME")
    if licence is None:
        licence = _ask_licence()
    results = None
    if with_results:
        from zoo.weights.bundle import weights_digest

        results = _finder(results_dir)(weights_digest(read_run(path)[1]))
    done = publish_run(path, name=name, tag=tag, licence=licence, results=results, force=force)
    if as_json:
        print_json(
            {
                "schema": 1,
                "name": done.name,
                "revision": done.revision,
                "new": done.new,
                "path": str(done.path),
            }
        )
    elif done.new:
        print(f"published {done.name}@{done.revision}" + (f" as {tag}" if tag else ""))
        print(f'load it with: zoo.load("{done.name}")')
    else:
        what = "tags moved to it" if done.moved else "nothing changed"
        print(f"{done.name}@{done.revision} was published before; {what}" + (f", tag {tag}" if tag else ""))


def _refuse(given: object, option: str, fix: str) -> None:
    if given:
        from zoo.errors import InputError

        raise InputError("This option has no meaning here.", where=option, fix=fix)


def _finder(results_dir: str | None) -> Callable[[str], list[dict[str, Any]]]:
    """From the hash of weights to their transfer results; says how many there are."""
    from transfer.results import results_of, results_root

    def find(weights_sha256: str) -> list[dict[str, Any]]:
        results = results_of(weights_sha256, Path(results_dir) if results_dir else None)
        note = log.info if results else log.warning
        note("%d results of these weights found in %s", len(results), results_dir or results_root())
        return results

    return find


def _publish_to(
    reference: str,
    to: str,
    results: Callable[[str], list[dict[str, Any]]] | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from zoo.publishing import AtHub, Plan, publish_to

    done = publish_to(reference, to, results=results, progress=not as_json, **settings)
    if as_json:
        print_json({"schema": 1, "dry_run": isinstance(done, Plan), **asdict(done)})
        return
    if isinstance(done, AtHub):
        state = "published" if done.new else "was published before:"
        print(
            f"{state} {done.address}@{done.revision}" + (f" as {settings['tag']}" if settings["tag"] else "")
        )
        print(f'load it with: zoo.load("hub:{done.address}")')
        return
    plan = done if isinstance(done, Plan) else done.plan
    what = f"{len(plan.send)} files to send ({plan.size / 1e6:.1f} MB), {len(plan.unchanged)} there already"
    if plan.drop:
        what += f", to remove: {', '.join(plan.drop)}"
    if plan.kept:
        what += f", left alone: {', '.join(plan.kept)}"
    if isinstance(done, Plan):
        print(f"{to}: {what}")
        print("nothing was sent (--dry-run)" + ("" if plan.exists else "; the repository would be made"))
        return
    state = "published" if done.new else "was published before:"
    print(f"{state} {to}@{done.commit}" + (f" as {done.tag}" if done.tag else ""))
    print(f"{what}; every hash is as here. {done.url}")
    print(f'load it with: zoo.load("{to}{f"@{done.tag}" if done.tag else ""}")')


def _ask_licence() -> str:
    if sys.stdin.isatty() and sys.stderr.isatty():
        return str(typer.prompt("Licence of the weights", default="unspecified", err=True))
    return "unspecified"


def list_models(as_json: Json = False) -> None:
    """List the models of the local hub, and the released weights of the catalog."""
    from zoo.weights import listing

    found = listing.list_models()
    if as_json:
        print_json(found)
        return
    home, rows = found["home"], found["models"]
    if rows:
        shown = [{**row, "tags": ", ".join(row["tags"])} for row in rows]
        print_table(f"Models in {home}", ["model", "latest", "tags", "revisions"], shown)
    else:
        print(f"no models in {home} (publish one with: zoo publish)")
    released = [{**row, "cached": "yes" if row["cached"] else "no"} for row in found["catalog"]]
    columns = ["name", "method", "arch", "epochs", "licence", "top1", "cached"]
    print_table("Released weights (zoo show NAME; zoo.load fetches them)", columns, released)


def show(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="ORG/NAME\\[@REVISION] of the local hub, hf:ORG/NAME, s3://BUCKET/FOLDER/ORG/NAME, "
            "hub:https://HOST/FOLDER/ORG/NAME, or a released one.",
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every byte, whatever was checked before.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a model is, and check that it is whole; of released weights, the catalog's card."""
    from zoo.weights.listing import bundle_document, card_named, published

    card = card_named(model)
    if card is not None:
        _show_card(card, verify, as_json)
        return
    bundle = published(model, not as_json, verify)
    document = bundle_document(bundle, verify)
    if as_json:
        print_json(document)
        return
    print((bundle.path / "README.md").read_text("utf-8"))
    print(f"revision {bundle.path.name} in {bundle.path}")
    print(
        f"weights  {bundle.weights_sha256}; {'all hashes checked' if document['checked'] == 'full' else 'checked before'}"
    )


def _show_card(card: Card, verify: bool, as_json: bool) -> None:
    from zoo.errors import InputError
    from zoo.weights.listing import card_document, card_lines

    if verify:
        raise InputError(
            "What is shown of released weights is their card, not their file.",
            where="--verify",
            fix=f"zoo verify {card.name}",
        )
    if as_json:
        print_json(card_document(card))
    else:
        print("\n".join(card_lines(card)))


def tag(
    model: Name,
    tag: Annotated[str, typer.Argument(help="The new name, e.g. v1.")],
    force: Force = False,
) -> None:
    """Give a published revision a fixed name, such as v1."""
    from zoo.weights.hubs.local import LocalHub
    from zoo.weights.listing import local_name

    name, revision = local_name(model)
    print(f"{name}@{tag} is {LocalHub().tag(name, revision, tag, force)}")


def rm(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A model of the local hub.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Delete a model with all its revisions (asks)."""
    from zoo.errors import InputError
    from zoo.weights.hubs.local import LocalHub

    hub = LocalHub()
    count = len(hub.revisions(model)) if hub.refs(model) else 0
    if not yes:
        if not sys.stdin.isatty():
            raise InputError(
                "Deleting asks first, and there is no terminal to ask on.", where=model, fix="add --yes"
            )
        typer.confirm(f"Delete {model} with {count} revision(s)?", abort=True, err=True)
    hub.remove(model)
    print(f"deleted {model}")


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="hf:ORG/NAME\\[@REVISION], s3://...; of the local hub ORG/NAME."
        ),
    ],
    out: Out = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="ORG/NAME", help="Under which it is kept here. Default: the one it has there."
        ),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy a model from elsewhere (hf:, s3://...) into the local hub, or from the local hub into a folder; verified."""
    set_up_notes()
    from zoo.weights.hubs.local import LocalHub, check_name
    from zoo.weights.listing import is_elsewhere, local_name

    if is_elsewhere(model):
        _refuse(out, "--out", "pull it first, then pull it out of the local hub")
        from zoo.publishing import pull as fetch

        done = fetch(model, name=name, force=force, progress=not as_json)
        if as_json:
            print_json({"schema": 1, "name": done.name, "revision": done.revision, "path": str(done.path)})
        else:
            print(f"{model} is {done.name}@{done.revision} in the local hub")
        return
    _refuse(name, "--name", "it goes with a model of another home, hf:ORG/NAME or s3://...")
    here, revision = local_name(model)
    check_name(here)
    target = Path(out or here.split("/")[1])
    LocalHub().pull(here, revision, target)
    print(f"{model} is in {target}")
