"""What is accepted by the solvers, their gradients and plans: a check per argument or field."""

from __future__ import annotations

from otdd_flash.arguments.comparisons import LOAD_RESULT
from otdd_flash.arguments.values import (
    BACKENDS,
    BATCHED_GRADIENTS,
    CG_CLASS,
    GROUNDS,
    PAIR,
    PRECISIONS,
    compute,
    cost,
    count,
    device,
    group,
    marginal_error,
    matrix,
    matrix_tensor,
    memory,
    not_negative,
    positive,
    positive_scalar,
    scalar,
    solver,
    start,
    traced_tensor,
)
from otdd_flash.checks import (
    Declaration,
    array,
    choice,
    flag,
    function,
    instance,
    number,
    optional,
    sequence,
    tensor,
    tensors,
)

SINKHORN: Declaration = {
    **PAIR,
    "cost": cost,
    "options": solver,
    "progress": optional(function),
    "epsilon": positive,
    "class_table": optional(array("(V_x + V_y, V_x + V_y)")),
    "compute": optional(compute),
}
SINKHORN_DIVERGENCE: Declaration = {
    **SINKHORN,
    "debias": flag,
    "start": start,
}
SINKHORN_LOSS: Declaration = {
    "options": solver,
    "x": tensor("(n, d) or (B, n, d)"),
    "y": tensor("(m, d) or (B, m, d)"),
    "a": optional(tensor("(n,) or (B, n)")),
    "b": optional(tensor("(m,) or (B, m)")),
    "epsilon": positive,
    "labels_x": optional(tensor("(n,) or (B, n)")),
    "labels_y": optional(tensor("(m,) or (B, m)")),
    "class_table": optional(tensor("(V_x + V_y, V_x + V_y)")),
    "class_totals": optional(sequence(count, length=2)),
    "lambda_x": scalar,
    "lambda_y": scalar,
    "ground": choice(*GROUNDS),
    "debias": flag,
    "start": start,
    "compute": optional(compute),
}
CG_OPTIONS: Declaration = {
    "tolerance": number("be between 0 and 1", lambda value: 0 < value < 1),
    "max_iterations": count,
    "damping": not_negative,
}
OF_ONE_PAIR: Declaration = {
    "x": tensor("(n, d)"),
    "y": tensor("(m, d)"),
    "a": optional(tensor("(n,)")),
    "b": optional(tensor("(m,)")),
    "labels_x": optional(tensor("(n,)")),
    "labels_y": optional(tensor("(m,)")),
}
SINKHORN_HESSIAN: Declaration = {
    **{name: check for name, check in SINKHORN_LOSS.items() if name != "ground"},
    **OF_ONE_PAIR,
    "lambda_x": not_negative,
    "lambda_y": not_negative,
    "cg": instance("be otdd.CGOptions()", CG_CLASS),
}
SINKHORN_POTENTIALS: Declaration = {
    **{name: check for name, check in SINKHORN_LOSS.items() if name not in ("ground", "debias")},
    **OF_ONE_PAIR,
    "cg": instance("be otdd.CGOptions()", CG_CLASS),
}
TRANSPORT_MAP: Declaration = {**SINKHORN_POTENTIALS, "values": optional(tensor("(m, k)"))}
SINKHORN_LOSSES: Declaration = {
    **{name: check for name, check in SINKHORN_LOSS.items() if name != "start"},
    "x": tensors("(n, d)"),
    "y": tensors("(m, d)"),
    "a": optional(tensors("(n,)")),
    "b": optional(tensors("(m,)")),
    "labels_x": optional(tensors("(n,)")),
    "labels_y": optional(tensors("(m,)")),
}

DOUBLY_STOCHASTIC: Declaration = {
    "logits": traced_tensor("(..., n, n)"),
    "iterations": optional(count),
    "tolerance": optional(positive),
    "max_iterations": count,
    "temperature": positive_scalar,
    "gradient": choice(*BATCHED_GRADIENTS),
    "compute": optional(compute),
}
SINKHORN_PLANS: Declaration = {
    "costs": tensor("(B, n, m)"),
    "a": optional(tensor("(n,) or (B, n)")),
    "b": optional(tensor("(m,) or (B, m)")),
    "epsilon": positive_scalar,
    "tolerance": marginal_error,
    "max_iterations": count,
    "gradient": choice(*BATCHED_GRADIENTS),
    "sizes": optional(tensor("(B, 2)")),
    "compute": optional(compute),
}

COST_BLOCKS: Declaration = {"n": count, "m": count, "block": function}
MATRIX_TRANSPORT: Declaration = {
    "costs": matrix,
    "a": optional(array("(n,)")),
    "b": optional(array("(m,)")),
    "epsilon": optional(positive),
    "epsilon_relative": optional(positive),
    "options": solver,
    "compute": optional(compute),
    "start": start,
    "progress": optional(function),
}
MATRIX_LOSS: Declaration = {
    **{name: check for name, check in MATRIX_TRANSPORT.items() if name != "progress"},
    "costs": matrix_tensor,
    "a": optional(tensor("(n,)")),
    "b": optional(tensor("(m,)")),
    "epsilon": positive,
    "self_costs": optional(sequence(tensor("(n, n) or (m, m)"), length=2)),
}
MATRIX_PLAN: Declaration = {
    **{name: check for name, check in MATRIX_TRANSPORT.items() if name != "progress"},
    "costs": tensor("(n, m)"),
    "a": optional(tensor("(n,)")),
    "b": optional(tensor("(m,)")),
    "cg": instance("be otdd.CGOptions()", CG_CLASS),
}
APPLY_PLAN: Declaration = {"values": array("(m, k)")}
LOAD_MATRIX: Declaration = {**LOAD_RESULT, "costs": matrix}
COMPUTE_OPTIONS: Declaration = {
    "device": device,
    "backend": choice(*BACKENDS),
    "precision": choice(*PRECISIONS),
    "memory_budget": memory,
    "group": optional(group),
}
LED: Declaration = {"work": function, "group": optional(group)}
GROUND_COST: Declaration = {
    "lambda_x": not_negative,
    "lambda_y": not_negative,
    "ground": choice(*GROUNDS),
}
