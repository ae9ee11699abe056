"""The report of a study: csv files, pictures, one HTML page, and a table for the terminal.

`writing` writes all files, with `pictures` and `page`; `commands.study` and `StudyResult`
(`study.result`) call it.
"""
