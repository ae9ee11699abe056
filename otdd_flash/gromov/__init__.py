"""Gromov-Wasserstein distances between datasets whose features have different dimensions.

    F(P) = lambda_x E(P) + lambda_y <W, P>
    E(P) = sum_ijkl P_ij P_kl (||x_i - x_k||^2 - ||y_j - y_l||^2)^2

`ground="gromov"` of `dataset_distance` and `pairwise_distances` comes here. It is no cost between
points but a sequence of transport problems: `energy` rewrites E and its linearisation, an
inner-product cost that `operators.comparison` and the solvers take as any other; `starts` proposes
where to begin, as F is not convex; `solve` repeats the linearisation; `bounds` are what no plan is
below; `distance` holds what the entry points call, and measures the table W.
"""
