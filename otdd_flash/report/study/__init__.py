"""The report of a study: csv files, pictures, one HTML page, and a table for the terminal.

`writing` writes all files and draws the pictures, with `page`; `commands.study` and `StudyResult`
(`study.result`) call it.
"""
