"""Frozen behaviour: numbers of some ninety small problems that a redesign must not change.

`python -m tests.frozen --against COMMIT` runs every case with the package of this tree and with
that of a commit, one after the other on this machine with one thread, and demands equal bits. It is
for changes that move code and nothing else. Names of cases, or parts of them, select a few:
`python -m tests.frozen --against HEAD~1 flows`.

`frozen.json` keeps the numbers of today. A processor with other vector units rounds otherwise, so
the file allows for that: values 1e-10 of their scale, 1e-9 where potentials are float32, potentials
and derivatives 1e-9 and 1e-5 of their largest entry, solver bounds 1% of their width, errors 1%;
iterations, passes and what ended a solve are equal. `tests/test_frozen.py` checks it, in the quick
tier the cases that it lists.

`python -m tests.frozen --write` runs the cases in every setting of the processor that this machine
has (`SETTINGS` in `running.py`) and enters those that agree within half of the allowances; it
names the others, with the fields that differ. `python -m tests.frozen --check` runs the cases of
the file in the same settings and changes nothing. A case has to pass it on a machine with AVX-512,
such as the hosts of H100s, as well: the file lists the settings under which it was written, and
`--check` says which it has tried. Where AVX-512 is missing no environment variable gives it.
"""
