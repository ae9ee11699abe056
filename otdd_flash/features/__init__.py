"""Features that stay in files.

A `feature_file` locates the rows of a matrix in files and reads them; `arrow_column` locates those
of Arrow files. `file_features` holds the tensors that read such a file as they are used; `samples`,
`operators` and the entry points recognise them, so that features larger than the memory can be
compared.
"""
