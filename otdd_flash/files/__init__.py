"""Files that appear whole or not at all, and are found damaged before they are used.

`atomic` puts files and folders in their place; `json_file` and `npz_file` are written through it,
and so is a `tensor_file`, which has a checksum. A `torch_file` holds what only torch can. The files
of a saved result are `result_files`, tensors by key a `cache`, and `locks` keep processes apart. By
which version a file is `written_by`, and in which format, stands in it.
"""
