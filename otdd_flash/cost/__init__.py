"""The ground cost between two labelled clouds, or of a given matrix, and its facts.

`points` are labelled clouds and the cost between two of them, `matrix` costs that are given;
`ground` says what of two points is compared, `class_table` holds W. `facts` are what bounds are
made of, and `rounding` what costs lose where points are rounded. `host_points` stay in host memory
or in files.

`compute` is how passes are to run, and `memory` what a device has left for them.
"""
