"""Random commands, calls, damaged files and kills, and what must hold of each.

`verdict` what counts as a failure; `commands` runs a command in this process or in one of its own;
`grammar` draws its settings, `calls` arguments of the public functions, `damage` flips and cuts
files that the project wrote, `kills` ends runs at random moments and resumes them.
"""
