"""Typed settings of the commands, and the check of what Hydra composed against them.

The dataclasses here have the keys of the files in `conf`; each command has a dataclass of its own,
in its module, that extends or holds some of them. `parse` checks a configuration and builds the
dataclass, `DatasetPairSettings.arguments` makes the arguments of a solve, and `recorded` returns
the settings as results store them. The work of the six commands (`commands.compare`, `adapt`,
`study`, `nearest`, `mix` and `shift`), `commands.sides` and `commands.results` use this module.

A key of `conf` needs a field of the same name, here or in the command's dataclass, because `parse`
refuses unknown keys, but for those in mappings such as a dataset. Values from environment variables
may be secret: `recorded` must replace them by the text that refers to them before anything is
written (`tests/commands/test_command_secrets.py`).
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, cast, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from otdd_flash.arguments import Count, NotNegative, check_fields, penalties
from otdd_flash.checks import LONGEST_SHOWN, optional
from otdd_flash.commands.arguments import check_references, given_at, leaves, unknown_key
from otdd_flash.commands.ranks import leading
from otdd_flash.commands.start import conceal_environment
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import DataNotice, InputError, choose
from otdd_flash.integrations.tracking import check_tracker
from otdd_flash.labels import METRICS, LabelMetric, Tree, fields_of, metric_named
from otdd_flash.labels.metrics import POOLED
from otdd_flash.otdd import LAMBDA_Y
from otdd_flash.report.heat_maps import ORDERS
from otdd_flash.report.page import CONTENTS
from otdd_flash.shown import display, hidden
from otdd_flash.solver.divergence import SCHEDULES
from otdd_flash.solver.penalties import refuse_unbalanced
from otdd_flash.solver.schedules import Converged, Exact, Schedule, schedule_of
from otdd_flash.solver.term import refuse_both

Schema = TypeVar("Schema")


@dataclass
class LogSettings:
    """One choice of conf/log, as a yaml file there holds it.

    Keys that this file lacks keep the defaults here.
    """

    tracker: str | None
    project: str | None = None
    name: str | None = None
    uri: str | None = None
    online: bool = False

    def check(self) -> None:
        """Raise an `InputError` for what the tracker cannot do, as far as known before the run."""
        check_tracker(self.tracker, self.uri, online=self.online)


@dataclass
class RuntimeSettings:
    """The settings of conf/runtime.yaml: where and how a command runs."""

    device: str
    backend: str
    precision: str
    memory_budget: Any
    seed: int
    max_samples: int | None
    data_root: str | None
    download: bool
    cache_dir: str | None
    overwrite: bool
    log: LogSettings
    log_level: str

    def compute_options(self) -> ComputeOptions:
        # `leading` returns the processes of torchrun that this one leads, or None.
        budget, ranks = self.memory_budget, leading()
        return ComputeOptions(self.device, self.backend, self.precision, budget, ranks)


@dataclass
class LabelSettings:
    """One choice of conf/labels.

    A key that is no field of its metric does nothing, and a notice says so if it was set; `full` is
    read by the commands. A further key is refused unless the metric, of another package, has it.
    """

    method: str
    full: bool
    unbiased: bool
    diagonal: bool
    epsilon: float | None
    path: str | None
    scale: Any = POOLED
    power: float = 1.0
    add: str | None = None
    # Further keys, of a metric from another package.
    parameters: dict[str, Any] = field(default_factory=dict)

    def metric(self, tolerance: float, epsilon: float | None) -> LabelMetric:
        """Build the metric that the settings describe.

        Args:
            tolerance: tolerance of the solves between classes.
            epsilon: the command's own key `epsilon`, which conf/labels takes as the default of
                `labels.epsilon`; a `labels.epsilon` equal to it counts as not given.

        Warns:
            DataNotice: a key is set that the method does not have.
        """
        # Keys of conf/labels that only some metrics have, with their defaults there. `full`, of all
        # methods, is for the commands: it says which rows are measured.
        usual: dict[str, Any] = {"unbiased": True, "diagonal": False, "epsilon": epsilon}
        usual |= {"path": None, "scale": POOLED, "power": 1.0, "add": None}
        # `labels.path` is the parameter `table` of `Given` and `parents` of `Tree`.
        files = ("table", "parents")
        own = {"path" if name in files else name for name in fields_of(self.method)}
        if self.add is not None and self.method == Tree.name:
            own |= set(fields_of(self.add))
        if unknown := [key for key in self.parameters if key not in own]:
            raise InputError(
                f"labels={self.method} has no labels.{unknown[0]}; it has: "
                f"{', '.join(sorted(own)) or 'none of its own'}"
            )
        for key, value in usual.items():
            given = str(getattr(self, key))
            # Compared as text, so that NaN equals itself.
            if key not in own and given != str(value):
                warnings.warn(
                    f"labels.{key}={given} does nothing with labels={self.method}",
                    DataNotice,
                    stacklevel=2,
                )
        parameters = {**asdict(self), "tolerance": tolerance, "table": self.path}
        parameters["parents"] = self.path
        if self.epsilon == epsilon == 0:
            # Exact transport between the datasets, which leaves that between classes to choose.
            parameters["epsilon"] = None
        parameters |= self.parameters
        if self.add is not None:
            parameters["add"] = metric_named(self.add, parameters)
        return metric_named(self.method, parameters)


@dataclass
class SolverSettings:
    """One choice of conf/solver, as a yaml file there holds it.

    Keys that this file lacks keep the defaults here.
    """

    schedule: str
    require_convergence: bool
    tolerance: float | None = None
    bound_width: float | None = None
    max_seconds: float | None = None
    max_iterations: int = 100_000
    scaling: float = 0.5
    diameter: float | None = None

    def options(self) -> Schedule:
        """Build the schedule that the settings describe.

        Raises:
            InputError: an unknown schedule, a value out of range, or a key that the schedule does
                not have.
        """
        kind = SCHEDULES[choose("solver.schedule", self.schedule, tuple(SCHEDULES))]
        own = {field.name for field in fields(kind) if field.init}
        for key in fields(self):
            foreign = key.name not in {*own, "schedule"}
            if foreign and getattr(self, key.name) != key.default:
                raise InputError(
                    f"solver.schedule={self.schedule} has no solver.{key.name}; leave it out, or "
                    "take another choice of solver"
                )
        return kind(**taken(self, kind))

    def at_zero(self) -> SolverSettings:
        """Return the settings for epsilon 0, which selects `exact` in place of the default."""
        if self.schedule != Converged.name:
            return self
        width = Exact.bound_width if self.bound_width is None else self.bound_width
        return replace(self, schedule=Exact.name, bound_width=width)


@dataclass
class ComparisonSettings:
    """Settings of the comparison and its solve, the same for distances, flows and studies."""

    labels: LabelSettings
    lambda_x: float
    # Null is the library's default.
    lambda_y: float | None
    ground: str
    epsilon: NotNegative | None
    epsilon_relative: NotNegative | None
    unbalanced: Any
    unbalanced_relative: Any
    min_class_size: Count | None
    solver: SolverSettings

    @property
    def debiased(self) -> bool:
        """Whether self terms are subtracted."""
        return True

    def check(self) -> None:
        """Raise an `InputError` for numbers that are invalid for any data."""
        check_fields(self)
        refuse_both(self.epsilon, self.epsilon_relative)
        options, *_ = schedule_of(self.schedule(), self.epsilon, self.epsilon_relative)
        accepted = optional(penalties)
        self.unbalanced = accepted("unbalanced", self.unbalanced)
        self.unbalanced_relative = accepted("unbalanced_relative", self.unbalanced_relative)
        given = self.unbalanced, self.unbalanced_relative
        refuse_unbalanced(*given, options, debias=self.debiased, ground=self.ground)

    def cost(self) -> GroundCost:
        lambda_y = LAMBDA_Y if self.lambda_y is None else self.lambda_y
        return GroundCost(self.lambda_x, lambda_y, self.ground)

    def check_metric(self, metric: LabelMetric) -> None:
        """Raise an `InputError` if the ground cost does not define class distances of a metric."""
        self.cost().check_labels(metric.name)

    def schedule(self) -> Schedule:
        """Build the schedule of the solver; an epsilon of 0 selects `exact`.

        Raises:
            InputError: as `SolverSettings.options`.
        """
        at_zero = 0 in (self.epsilon, self.epsilon_relative)
        return (self.solver.at_zero() if at_zero else self.solver).options()

    def deferred(self) -> Schedule:
        """Build the schedule without `require_convergence`.

        Commands write their results first and raise for missing convergence afterwards.
        """
        return replace(self.schedule(), require_convergence=False)

    def metric(self) -> LabelMetric:
        return self.labels.metric(self.schedule().asked_tolerance, self.epsilon)


@dataclass
class SamplingSettings:
    """Settings of the sampling error that a distance reports."""

    subsample: int | None
    subsample_size: int | None
    noise_floor: bool


@dataclass
class ReportSettings:
    """The content of the report besides the distance, and the order in pictures."""

    content: str
    order: str = "given"

    def __post_init__(self) -> None:
        """Raise an `InputError` unless content and order are known."""
        choose("report", self.content, CONTENTS)
        choose("report.order", self.order, ORDERS)


@dataclass
class FlowNode:
    """The settings of conf/flow.yaml under `flow`."""

    mode: str
    steps: int
    step_size: float
    optimizer: str
    optimizer_options: dict[str, Any] | None
    schedule: str
    box: Any
    noise: float
    minibatch: int | None
    refresh: int
    tolerance: float | None
    functionals: list[Any]
    space: str
    image_size: int | None
    checkpoint_every: int
    resume: bool
    keep_moments: bool


@dataclass
class EmbeddingSettings(RuntimeSettings):
    """How datasets are embedded, and what their labels are."""

    extractor: dict[str, Any]
    labels: LabelSettings


@dataclass
class DatasetPairSettings(ComparisonSettings, EmbeddingSettings):
    """Two datasets, how both are embedded and compared, and what is written."""

    source: dict[str, Any]
    target: dict[str, Any]
    report: ReportSettings
    save_result: bool

    def arguments(self) -> dict[str, Any]:
        """Return the keywords that `dataset_distance` and `gradient_flow` share.

        Call it before data are read: a bad setting should not cost the time of loading.

        Raises:
            InputError: a setting is invalid for any data.
        """
        self.check()
        self.log.check()
        metric = self.metric()
        self.check_metric(metric)
        return {
            "epsilon": self.epsilon,
            "epsilon_relative": self.epsilon_relative,
            "unbalanced": self.unbalanced,
            "unbalanced_relative": self.unbalanced_relative,
            "labels": metric,
            "min_class_size": self.min_class_size,
            "solver": self.deferred(),
            "compute": self.compute_options(),
            "cache_dir": self.cache_dir,
        }


def taken(settings: Any, kind: type) -> dict[str, Any]:
    """Return the settings that are fields of a dataclass of options, by name."""
    names = [field.name for field in fields(kind) if field.init]
    return {name: getattr(settings, name) for name in names if hasattr(settings, name)}


def recorded(settings: Any, config: DictConfig) -> dict[str, Any]:
    """Return settings as results and trackers store them, without values of the environment.

    A key that depends on `${oc.env:NAME}`, directly or through other keys, keeps the text `${...}`
    that was written for it, because the variable may hold a secret. Passwords in addresses are left
    out.

    Args:
        settings: the dataclass that `parse` returned.
        config: the configuration.
    """
    plain: dict[str, Any] = _without_passwords(asdict(settings))
    # On the command line, parameters of another package's metric are keys of `labels`.
    plain["labels"] |= plain["labels"].pop("parameters")
    for path, text in _from_environment(config):
        *parents, last = path
        node: Any = plain
        for key in parents:
            node = node[key]
        node[last] = text
    return plain


def _without_passwords(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_passwords(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_without_passwords(value) for value in node]
    return hidden(node) if isinstance(node, str) else node


def _from_environment(config: DictConfig) -> list[tuple[tuple[Any, ...], str]]:
    """Return the paths of keys whose values depend on the environment, with their text."""
    known = leaves(OmegaConf.to_container(config))
    written = [(path, text) for path, text in known if isinstance(text, str) and "${" in text]
    before = [_resolved(config, path) for path, _ in written]
    # Resolve again with random values for all variables of the environment, and compare.
    OmegaConf.register_new_resolver("oc.env", lambda *_: secrets.token_hex(8), replace=True)
    try:
        after = [_resolved(config, path) for path, _ in written]
    finally:
        # Back to the resolver that returns the variables' values and has them hidden in all output.
        conceal_environment()
    return [one for one, then, now in zip(written, before, after, strict=True) if then != now]


def _resolved(config: DictConfig, path: tuple[Any, ...]) -> Any:
    node: Any = config
    try:
        for key in path:
            node = node[key]
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException:
        return None


def parse(config: DictConfig, schema: type[Schema]) -> Schema:
    """Check a composed configuration against a dataclass and build it.

    Raises:
        InputError: a value has the wrong type, is missing, unknown, or refers to nothing.
    """
    # Repeated here, because a launcher may run this job in another process.
    conceal_environment()
    check_references(config)
    try:
        # The unresolved values come first: a bad one is reported under its own key, not under one
        # that refers to it.
        OmegaConf.merge(OmegaConf.structured(schema), _set_apart(OmegaConf.to_container(config)))
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        typed = OmegaConf.merge(OmegaConf.structured(schema), _set_apart(resolved))
        return cast(Schema, OmegaConf.to_object(typed))
    except ConfigKeyError as error:
        raise InputError(unknown_key(error.full_key or str(error.key), config)) from error
    except MissingMandatoryValue as error:
        raise InputError(f"{error.full_key} must be given: {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise _mistyped(error, *given_at(config, error.full_key or "")) from error


def _set_apart(plain: Any) -> Any:
    """Move keys that only another package's metric has into the mapping `labels.parameters`."""
    labels = plain.get("labels")
    if isinstance(labels, dict) and METRICS.package(str(labels.get("method"))) is not None:
        known = {field.name for field in fields(LabelSettings)} - {"parameters"}
        more = {key: value for key, value in labels.items() if key not in known}
        kept = {key: value for key, value in labels.items() if key in known}
        return {**plain, "labels": {**kept, "parameters": more}}
    return plain


WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def _mistyped(error: OmegaConfBaseException, key: str, value: Any) -> InputError:
    """Return the error for a value that its key does not accept."""
    if error.child_node is None:
        # Null was given in place of a mapping.
        accepted = "a mapping" if key else None
    else:
        known = error.child_node._metadata
        kind = get_origin(known.ref_type) or known.ref_type
        accepted = "a mapping" if is_dataclass(kind) else WORDS.get(kind)
        if accepted and known.optional:
            accepted += " or null"
    if accepted is None:
        return InputError(f"{key or 'configuration'}: {str(error).splitlines()[0]}")
    # The value is shown as the command line writes it, with text in quotes.
    written = "null" if value is None else repr(value)
    written = written.lower() if isinstance(value, bool) else written
    return InputError(f"{key} must be {accepted}, got {display(written, LONGEST_SHOWN)}")
