"""`log=wandb`: an offline run in RUN/wandb, which `wandb sync` sends if its owner wants that."""

from __future__ import annotations

from otdd_flash.integrations.tracking import TrackedRun

PROJECT = "otdd-flash"


def write(run: TrackedRun) -> None:
    """Write settings, series step by step, numbers as the run's summary, and pictures."""
    import wandb

    tracked = wandb.init(
        project=PROJECT,
        name=run.name,
        dir=str(run.directory),
        config=run.flat_config,
        # Nothing leaves this machine.
        mode="offline",
        reinit="create_new",
        settings=wandb.Settings(silent=True),
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
