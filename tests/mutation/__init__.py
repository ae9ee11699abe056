"""Break one expression at a time and see whether a test fails: `make mutants`.

`drawing` makes the mutants, `choosing` the tests that a mutant can fail, `running` runs them in a
process that is forked for it. What a processor never executes, compiled kernels and lines marked
`# pragma: gpu`, is left out.
"""
