"""Features that stay in files.

`file_features` locates the rows of a matrix in files, reads them, and holds the tensors that do so
as they are used; `arrow_column` locates those of Arrow files. `samples`, `operators` and the entry
points recognise such tensors, so that features larger than the memory can be compared.
"""
