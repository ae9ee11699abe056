"""Shift tests: whether data have shifted, how far and where, with a p-value that is valid.

`joint` holds the entry points, for two samples and for a stream; `rows` pools both sides, `pooled`
solves many problems on one cloud and counts the hits of permutations, `parts` and `effect` say
where and how far, and `result` holds it all. `otdd_flash` exports `shift_test`, `shift_windows` and
`ShiftReport`; the command is `python -m otdd_flash.shift` (`__main__`). Nothing is imported here,
so that help is shown without torch.
"""
