"""The tracker `log=wandb`: an offline run for `wandb sync`, or an online run if asked for.

`integrations.tracking.track` imports this module and calls `write`. wandb is an optional package,
so it is imported in the function that uses it. A run holds settings and results only: no arguments,
terminal output, code or description of the machine, which may contain secrets.
"""

from __future__ import annotations

from pathlib import Path

from otdd_flash.integrations.tracking import PROJECT, TrackedRun, environment

# wandb would send reports of its own errors, also from an offline run.
SETTINGS = {"WANDB_ERROR_REPORTING": "false"}


@environment(SETTINGS)
def write(run: TrackedRun) -> None:
    """Write settings, series step by step, numbers as the run's summary, and pictures."""
    import wandb

    address = {"base_url": run.store} if isinstance(run.store, str) else {}
    folder = run.store if isinstance(run.store, Path) else run.directory
    folder.mkdir(parents=True, exist_ok=True)
    tracked = wandb.init(
        project=run.project or PROJECT,
        name=run.name,
        group=run.group,
        dir=str(folder),
        config=run.flat_config,
        mode="online" if run.online or address else "offline",
        reinit="create_new",
        settings=wandb.Settings(
            silent=True,
            # A run is its settings: no command-line arguments, which may hold a secret, no terminal
            # output, no code and no description of the machine.
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            **address,
        ),
    )
    try:
        by_step: dict[int, dict[str, float]] = {}
        for name, points in run.series.items():
            for step, value in points:
                by_step.setdefault(step, {})[name] = value
        for step in sorted(by_step):
            tracked.log(by_step[step], step=step)
        pictures = {path.stem: wandb.Image(str(path)) for path in run.pictures}
        tracked.log({**run.numbers, **pictures})
        tracked.summary.update(dict(run.numbers))
    finally:
        tracked.finish()
