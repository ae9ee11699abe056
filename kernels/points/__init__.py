"""Points as kernels read them: rounded, in digits with their losses, on lattices.

Kernels of `passes` and `linear`, the operators in Triton (`operators.triton_operator`,
`operators.triton_plans`, `operators.fixed_point`) and `cost.rounding` call them.
"""
