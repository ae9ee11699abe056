"""Optimal Transport Dataset Distance with certified solver bounds: the public names.

How data move through the package:

    load -> LabeledDataset -> embed -> LabeledSamples -> dataset_distance -> DistanceResult
                                                      -> pairwise_distances -> PairwiseResult
                                                      -> index, nearest -> Ranking
                                                      -> mixture -> Mixture
                                                      -> sliced_distances -> SlicedResult
                                                      -> Study -> StudyResult
                                                      -> gradient_flow -> FlowResult
                                                      -> subsample_interval, noise_floor
                                                      -> shift_test -> ShiftReport

Conventions, the same everywhere:

    points       x (n, d), y (m, d); masses a (n,), b (m,) sum to 1
    ground cost  C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j], lambda_x = lambda_y = 1/2
    W            squared 2-Wasserstein distances between classes, for the cost ||.||^2
    OT_epsilon   min_P <C, P> + epsilon KL(P | a b^T), epsilon in units of the cost
    plan         P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon), potentials in units of the cost
    value        S_epsilon = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2
    randomness   one seed; every draw comes from a local generator

A name is imported at its first use (PEP 562), so importing the package imports no torch. Nothing
reached from here imports Hydra; the commands, such as `python -m otdd_flash.distance`, do. A new
public name needs an entry in `_HOMES` and among the imports for type checkers
(`tests/test_public_names.py` guards all three). Users, `experiments` and `notebooks` import these
names. Modules of the package import each other, and from here only `__version__`; `plugins` and
`commands.start` also use `_started_in`, and `plugins` `_appended`, so these must stay. The working
directory must leave sys.path before anything else is imported here.
"""

from __future__ import annotations

import os
import sys

# Written into files, into keys of cached features and into messages, and compared between ranks.
__version__ = "0.2.0"

# The folder in which a command was started: the one that `python -m otdd_flash.distance` puts into
# sys.path, or that `commands.start.run_script` sets for a console command.
_started_in: str | None = None
# Folders appended to sys.path since; no packages with plug-ins are searched there.
_appended: list[str] = []
# While Python looks for the module of `-m`, sys.argv starts with `-m`; the module is the next
# original argument.
_run = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) :][:1] if sys.argv[:1] == ["-m"] else []
if _run and _run[0].removeprefix("-m").startswith("otdd_flash.") and not sys.flags.safe_path:
    # Python has put the working directory first: a file called torch.py beside the data would be
    # imported instead of torch. Only a checkout that is run from its own folder needs that
    # directory, last.
    _started_in = sys.path.pop(0)
    _package = os.path.dirname(os.path.realpath(__file__))
    if os.path.realpath(_started_in) == os.path.dirname(_package):
        sys.path.append(_started_in)
        _appended.append(_started_in)

# Imported after that, for the same reason.
from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    # `X as X` makes a name public to type checkers (PEP 484).
    from otdd_flash import extractors as extractors
    from otdd_flash import labels as labels
    from otdd_flash import nn as nn
    from otdd_flash.attention.attention import sinkhorn_attention as sinkhorn_attention
    from otdd_flash.batched.doubly_stochastic import doubly_stochastic as doubly_stochastic
    from otdd_flash.batched.plans import SmallPlans as SmallPlans
    from otdd_flash.batched.plans import sinkhorn_plans as sinkhorn_plans
    from otdd_flash.cost.compute import ComputeOptions as ComputeOptions
    from otdd_flash.cost.ground import GroundCost as GroundCost
    from otdd_flash.data.registry import load as load
    from otdd_flash.derivatives.hessian import HessianProduct as HessianProduct
    from otdd_flash.derivatives.hessian import SinkhornHessian as SinkhornHessian
    from otdd_flash.derivatives.hessian import sinkhorn_hessian as sinkhorn_hessian
    from otdd_flash.derivatives.loss import sinkhorn_loss as sinkhorn_loss
    from otdd_flash.derivatives.loss import sinkhorn_losses as sinkhorn_losses
    from otdd_flash.derivatives.plan_system import CGOptions as CGOptions
    from otdd_flash.derivatives.potentials import sinkhorn_potentials as sinkhorn_potentials
    from otdd_flash.derivatives.potentials import transport_map as transport_map
    from otdd_flash.distributed.ranks import led as led
    from otdd_flash.errors import ConvergenceError as ConvergenceError
    from otdd_flash.errors import DataNotice as DataNotice
    from otdd_flash.errors import InputError as InputError
    from otdd_flash.errors import NotConvergedWarning as NotConvergedWarning
    from otdd_flash.extractors import embed as embed
    from otdd_flash.features.file_features import features_file as features_file
    from otdd_flash.flows.checkpoint import Checkpoints as Checkpoints
    from otdd_flash.flows.flow import Callbacks as Callbacks
    from otdd_flash.flows.flow import Flow as Flow
    from otdd_flash.flows.result import FlowResult as FlowResult
    from otdd_flash.flows.run import gradient_flow as gradient_flow
    from otdd_flash.flows.stepping import Stepping as Stepping
    from otdd_flash.labels import ClassDistances as ClassDistances
    from otdd_flash.labels import JointClassDistances as JointClassDistances
    from otdd_flash.labels import class_distances as class_distances
    from otdd_flash.mixing.mixture import mixture as mixture
    from otdd_flash.mixing.result import Mixture as Mixture
    from otdd_flash.operators.given_costs import CostBlocks as CostBlocks
    from otdd_flash.otdd import dataset_distance as dataset_distance
    from otdd_flash.pairwise import PairwiseResult as PairwiseResult
    from otdd_flash.pairwise import pairwise_distances as pairwise_distances
    from otdd_flash.ranking.index import Index as Index
    from otdd_flash.ranking.index import index as index
    from otdd_flash.ranking.race import Ranking as Ranking
    from otdd_flash.ranking.race import nearest as nearest
    from otdd_flash.result import DistanceResult as DistanceResult
    from otdd_flash.samples import LabeledSamples as LabeledSamples
    from otdd_flash.sampling.subsampling import NoiseFloor as NoiseFloor
    from otdd_flash.sampling.subsampling import SubsampleInterval as SubsampleInterval
    from otdd_flash.sampling.subsampling import noise_floor as noise_floor
    from otdd_flash.sampling.subsampling import subsample_interval as subsample_interval
    from otdd_flash.shift.joint import shift_test as shift_test
    from otdd_flash.shift.joint import shift_windows as shift_windows
    from otdd_flash.shift.result import ShiftReport as ShiftReport
    from otdd_flash.sliced import SlicedResult as SlicedResult
    from otdd_flash.sliced import sliced_distances as sliced_distances
    from otdd_flash.solver.geomloss import GeomlossSchedule as GeomlossSchedule
    from otdd_flash.solver.matrix.gradients import matrix_loss as matrix_loss
    from otdd_flash.solver.matrix.gradients import matrix_plan as matrix_plan
    from otdd_flash.solver.matrix.result import MatrixTransport as MatrixTransport
    from otdd_flash.solver.matrix.transport import matrix_transport as matrix_transport
    from otdd_flash.solver.schedules import Converged as Converged
    from otdd_flash.solver.schedules import Exact as Exact
    from otdd_flash.solver.solving import sinkhorn as sinkhorn
    from otdd_flash.solver.solving import sinkhorn_divergence as sinkhorn_divergence
    from otdd_flash.study.result import StudyResult as StudyResult
    from otdd_flash.study.setup import Transfer as Transfer
    from otdd_flash.study.study import Study as Study

# The module that defines each name, and the modules that are public themselves.
_HOMES = {
    "Callbacks": "otdd_flash.flows.flow",
    "Checkpoints": "otdd_flash.flows.checkpoint",
    "ClassDistances": "otdd_flash.labels",
    "CGOptions": "otdd_flash.derivatives.plan_system",
    "ComputeOptions": "otdd_flash.cost.compute",
    "CostBlocks": "otdd_flash.operators.given_costs",
    "Converged": "otdd_flash.solver.schedules",
    "ConvergenceError": "otdd_flash.errors",
    "DataNotice": "otdd_flash.errors",
    "DistanceResult": "otdd_flash.result",
    "Exact": "otdd_flash.solver.schedules",
    "Flow": "otdd_flash.flows.flow",
    "FlowResult": "otdd_flash.flows.result",
    "GeomlossSchedule": "otdd_flash.solver.geomloss",
    "GroundCost": "otdd_flash.cost.ground",
    "HessianProduct": "otdd_flash.derivatives.hessian",
    "Index": "otdd_flash.ranking.index",
    "InputError": "otdd_flash.errors",
    "JointClassDistances": "otdd_flash.labels",
    "LabeledSamples": "otdd_flash.samples",
    "MatrixTransport": "otdd_flash.solver.matrix.result",
    "Mixture": "otdd_flash.mixing.result",
    "NoiseFloor": "otdd_flash.sampling.subsampling",
    "NotConvergedWarning": "otdd_flash.errors",
    "PairwiseResult": "otdd_flash.pairwise",
    "Ranking": "otdd_flash.ranking.race",
    "led": "otdd_flash.distributed.ranks",
    "Stepping": "otdd_flash.flows.stepping",
    "Study": "otdd_flash.study.study",
    "StudyResult": "otdd_flash.study.result",
    "Transfer": "otdd_flash.study.setup",
    "ShiftReport": "otdd_flash.shift.result",
    "SinkhornHessian": "otdd_flash.derivatives.hessian",
    "SlicedResult": "otdd_flash.sliced",
    "SmallPlans": "otdd_flash.batched.plans",
    "SubsampleInterval": "otdd_flash.sampling.subsampling",
    "class_distances": "otdd_flash.labels",
    "dataset_distance": "otdd_flash.otdd",
    "doubly_stochastic": "otdd_flash.batched.doubly_stochastic",
    "embed": "otdd_flash.extractors",
    "features_file": "otdd_flash.features.file_features",
    "gradient_flow": "otdd_flash.flows.run",
    "index": "otdd_flash.ranking.index",
    "load": "otdd_flash.data.registry",
    "matrix_loss": "otdd_flash.solver.matrix.gradients",
    "matrix_plan": "otdd_flash.solver.matrix.gradients",
    "matrix_transport": "otdd_flash.solver.matrix.transport",
    "nearest": "otdd_flash.ranking.race",
    "mixture": "otdd_flash.mixing.mixture",
    "noise_floor": "otdd_flash.sampling.subsampling",
    "pairwise_distances": "otdd_flash.pairwise",
    "shift_test": "otdd_flash.shift.joint",
    "shift_windows": "otdd_flash.shift.joint",
    "sinkhorn": "otdd_flash.solver.solving",
    "sinkhorn_attention": "otdd_flash.attention.attention",
    "sinkhorn_divergence": "otdd_flash.solver.solving",
    "sinkhorn_hessian": "otdd_flash.derivatives.hessian",
    "sinkhorn_loss": "otdd_flash.derivatives.loss",
    "sinkhorn_losses": "otdd_flash.derivatives.loss",
    "sinkhorn_plans": "otdd_flash.batched.plans",
    "sinkhorn_potentials": "otdd_flash.derivatives.potentials",
    "sliced_distances": "otdd_flash.sliced",
    "subsample_interval": "otdd_flash.sampling.subsampling",
    "transport_map": "otdd_flash.derivatives.potentials",
}
_MODULES = ("extractors", "labels", "nn")


if not TYPE_CHECKING:
    # Hidden from type checkers, which would otherwise accept any name of this module.
    __all__ = sorted(("__version__", *_MODULES, *_HOMES))

    def __getattr__(name: str) -> Any:
        """Import the definition of a public name at its first use."""
        if name in _MODULES:
            return import_module(f"otdd_flash.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        # Later uses find the name itself.
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return __all__
