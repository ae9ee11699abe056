"""Features that stay in files.

`layout` finds where in a file the rows of a matrix are, or has `arrow_column` find them: `pieces`.
A `feature_file` reads them, and `file_features` are the tensor that does so when it is used.
"""
