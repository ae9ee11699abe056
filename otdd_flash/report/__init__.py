"""Files and tables of finished results: pictures, csv files and short tables for the terminal.

`distance`, `pairwise`, `contributions` and `sweep` write the reports of distances, `flow.writing`
that of a flow and `study.writing` that of a study; `figures` holds what their pictures share and
`csv_tables` what their csv files share. The commands and the results' own methods call them.
Nothing here computes transport. Functions that draw import matplotlib and rich themselves.
"""
