"""The ground cost of two labelled clouds, with its range, mean and errors.

`points` has labelled clouds and the cost between two of them; a cost that is given as a matrix or
a function is in `operators.given_costs`. `ground` turns every choice of c(x, y) into a squared
distance, `class_table` holds the class distances W. `facts` are the numbers that bounds are made
of; `rounding` bounds the cost error of rounded points. `host_points` are clouds in host memory or
in files that are streamed to the device.

`compute` has the options of a pass: device, precision, backend and memory. Operators and class
distances read these modules, which import neither.
"""
