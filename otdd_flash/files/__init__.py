"""Files that appear whole or not at all, and whose damage is detected before they are used.

`atomic` writes files and folders, locks and JSON; a `tensor_file` holds tensors with a checksum and
the version and format number that every file carries, and reads torch's and npz files; so do the
two files of a saved result; `cache` stores tensors by key. Results, flows, studies, `extractors`,
`labels` and `commands` write their files through these modules.
"""
