"""Files and tables of finished results: pictures, csv files and short tables for the terminal.

`distance`, `pairwise` and `sweep` write the reports of distances, `flow.writing` that of a flow and
`study.writing` that of a study, `nearest` that of a ranking, `mixture` that of a mixture (both by
`bars`), `shift` that of a shift test; `figures` holds what their pictures share and `tables` what
their tables share. The commands and `commands.outcome` call them, and so do the methods `plot` of
results. Nothing here computes transport. Functions that draw import matplotlib and rich themselves,
because both take long to import and most runs of the package draw nothing.
"""
