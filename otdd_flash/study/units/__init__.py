"""The work of a study as a list of units, each computed once and kept in a file of its own.

Concepts, one file each: `unit` is a piece of work with the key that names its file; `store` is the
folder of these files; `work` goes through a list of units beside other processes that do the same.
"""
