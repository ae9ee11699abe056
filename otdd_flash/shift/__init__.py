"""Shift tests: whether data have shifted, how far and where, with a p-value that is valid.

`joint` is the entry point; `rows` pools both sides, `pooled` solves many problems on one cloud,
`permutation` counts hits, `parts` and `effect` say where and how far, `result` holds it all, and
`windows` tests a stream. `otdd_flash` exports `shift_test`, `shift_windows` and `ShiftReport`; the
command is `python -m otdd_flash.shift` (`__main__`). Nothing is imported here, so that help is
shown without torch.
"""
