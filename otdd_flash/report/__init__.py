"""Files and tables of finished results: pictures, csv files and short tables for the terminal.

`distance`, `pairwise` and `sweep` write the reports of distances, `flow` that of a flow, with the
pictures of `flow_pictures`, `study.writing` that of a study, `nearest` that of a ranking, `mixture`
that of a mixture, `shift` that of a shift test. `page` holds the page, style and fonts of all
pictures and the writing of files, `heat_maps` matrices between classes or datasets, `planes`
projected points and the names beside points, and `tables` what tables share. The commands and
`commands.outcome` call them, and so do the methods `plot` of results. Nothing here computes
transport. Functions that draw import matplotlib and rich themselves, because both take long to
import and most runs of the package draw nothing.
"""
