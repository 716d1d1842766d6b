"""`outrider train-drafter`: trains a draft head for a model on answers of the model itself."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from outrider.commands.loading import load
from outrider.commands.parser import UsageError, engine_config
from outrider.training.settings import TrainingSettings
from outrider.training.workspace import Workspace


def training_settings(args: argparse.Namespace) -> TrainingSettings:
    """Make the settings from the flags that were given; the others have their defaults. It raises errors before a model
    is loaded."""
    given: dict[str, Any] = {field.name: value for field in dataclasses.fields(TrainingSettings)
                             if (value := getattr(args, field.name, None)) is not None}
    return TrainingSettings(**given)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args, speculative_config=None)
    if config.speculative_config is not None:
        raise UsageError("--speculative-config cannot be used to train a drafter: leave it out")
    settings, workspace = training_settings(args), Workspace(Path(args.out))
    prompts_file = None if args.prompts is None else Path(args.prompts)
    if prompts_file is not None and not prompts_file.is_file():
        raise UsageError(f"--prompts: there is no file {prompts_file}. Name one that exists")
    workspace.check_empty(resume=args.resume)
    target = load(config, needs_text=False)
    from outrider.training.run import train_drafter  # with torch, which `load` imports when the model is found

    done = train_drafter(target, config, settings, workspace, prompts_file=prompts_file,
                         report=lambda line: print(line, flush=True))
    print(json.dumps({"command": "train-drafter", "model": target.name, "method": settings.method,
                      "out": str(workspace.folder), "device": str(target.device), **done.as_json()}))
    return 0
