"""``torchboost levels`` and ``torchboost explain``: what a level turns on, and what it omits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer

from torchboost.bench.factory import Factory
from torchboost.bench.report.table import print_table
from torchboost.cli.shared import Display, answer_only, fail, print_csv, print_json, usable_device, user_errors
from torchboost.config import BoostConfig, ConfigSource
from torchboost.core.hardware import device_fault, half_precision
from torchboost.errors import ConfigError
from torchboost.front import boost
from torchboost.plan import Plan
from torchboost.registry import LEVELS, REGISTRY, Facts
from torchboost.sheet import Row


def show_levels(*, json: bool, csv: bool) -> None:
    """Print a line per algorithm, with its settings at each level."""
    table = {
        level: {name: _settings_of(REGISTRY[name].algorithm(**settings)) for name, settings in row.items()}
        for level, row in LEVELS.items()
    }
    if json:
        algorithms = [{"name": e.name, "summary": e.summary, "section": e.section} for e in REGISTRY.values()]
        print_json({"levels": table, "algorithms": algorithms})
        return

    def mark(settings: Mapping[str, Any] | None) -> str:
        if settings is None:
            return "-"
        return ", ".join(f"{key}={value}" for key, value in settings.items()) or "on"

    head = ["algorithm", *LEVELS, "what it does"]
    rows = [[e.name, *(mark(row.get(e.name)) for row in LEVELS.values()), e.summary] for e in REGISTRY.values()]
    if csv:
        print_csv([dict(zip(head, row, strict=True)) for row in rows])
        return
    print_table(head, rows)
    typer.echo("A level leaves out what does not fit the model or the machine: see `torchboost explain`.")


def show_plan(
    config: str | None,
    level: str,
    *,
    total_steps: int | None,
    nodes: int,
    device: str,
    convolutions: int | None,
    json: bool,
) -> None:
    """Print what a level and a configuration turn on for this machine."""
    try:
        source = _source(config)
        facts = _facts(BoostConfig.load(source), nodes, device, convolutions)
        plan = Plan.of(level, source, facts, total_steps=total_steps)
    except ConfigError as error:
        _refuse(error, json)
    _show(plan, plan.explain(), json)


def show_plan_of_model(source: str, level: str, *, total_steps: int | None, device: str, json: bool) -> None:
    """Print what a level turns on for the model and optimizer of a factory. Nothing is trained."""
    with user_errors(Display(sys.stderr)), answer_only(json):
        parts = Factory.at(source).build(0)
        model = parts.model.to(usable_device(device)).train()
        boosted = boost(model, parts.optimizer, level, total_steps=total_steps)
        plan, text = boosted.plan, boosted.explain()
        rows = boosted.levers.explanation().rows
        boosted.remove()
    _show(plan, text, json, rows)


def _show(plan: Plan, text: str, json: bool, rows: Sequence[Row] = ()) -> None:
    if not json:
        typer.echo(text)
        return
    on = [{"name": a.name, "summary": REGISTRY[a.name].summary, "settings": _settings_of(a)} for a in plan.algorithms]
    waiting, told = [row.name for row in rows if row.state == "waits"], {row.name: row.did for row in rows}
    dropped = [{"name": d.name, "reason": told.get(d.name, d.reason)} for d in plan.dropped if d.name not in waiting]
    recipe = plan.recipe.model_dump(mode="json")
    choice = {"level": plan.level, "mode": plan.mode, "total_steps": plan.total_steps, "recipe": recipe}
    print_json({**choice, "algorithms": on, "waiting": waiting, "dropped": dropped})


def _settings_of(algorithm: Any) -> dict[str, Any]:
    return {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm) if field.init}


def _refuse(error: ConfigError, json: bool) -> NoReturn:
    if not json:
        fail(str(error))
    parts = {name: getattr(error, name) for name in ("path", "found", "allowed", "hint")}
    print_json({"valid": False, **parts, "message": str(error)})
    raise typer.Exit(1)


def _source(config: str | None) -> ConfigSource:
    if config != "-":
        return Path(config) if config is not None else None
    text = sys.stdin.read().lstrip()
    # BoostConfig.load takes text that is not a JSON object for a path. Here it can only be a mistake.
    if not text.startswith("{"):
        content = f"text on standard input that starts with {text[:20]!r}" if text else "nothing on standard input"
        raise ConfigError("", found=content, allowed="a JSON object")
    return text


def _facts(config: BoostConfig, nodes: int, device: str, convolutions: int | None) -> Facts:
    try:
        kind = usable_device(device) if device == "auto" else torch.device(device)
    except RuntimeError:
        fail(f"--device: found {device!r}; allowed: a device of torch, such as cpu or cuda.")
    here = config.common.device_number if nodes > 1 else 1
    half = half_precision(kind, convolutions) if device_fault(kind) is None else None
    return Facts(
        world_size=nodes * here,
        nodes=nodes,
        devices_per_node=here,
        device=kind.type,
        half_precision=None if half is None else half.fast,
        half_precision_reason="" if half is None else half.reason,
        convolutions=convolutions,
    )
