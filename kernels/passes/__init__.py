"""One pass over the scores of a single problem: softmins, plans applied, sums of plans.

`operators.triton_operator`, `operators.triton_plans` and `operators.fixed_point` call them.
"""
