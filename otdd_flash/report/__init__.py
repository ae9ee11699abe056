"""What a finished distance or flow looks like on disk and in the terminal: pictures, tables, JSON.

`writing.write_report` draws everything for one distance, `flow_writing.write_flow_report` for one
flow; the other modules each write one kind of file. Nothing here computes transport.
"""
