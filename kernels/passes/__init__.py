"""One pass over the scores of a single problem: softmins, plans applied, sums of plans.

`operators.triton_operator`, `operators.triton_plans`, `operators.fixed_point` and
`operators.kernel_self_share` call them.
"""
