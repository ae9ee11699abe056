"""What a finished distance looks like on disk and in the terminal: pictures, csv tables, JSON.

`writing.write_report` draws everything for one result; the other modules each write one kind of
file. Nothing here computes transport.
"""
