"""What a finished distance or flow looks like on disk and in the terminal: pictures, tables, JSON.

`distance.writing` draws everything for one distance, `flow.writing` for one flow, and `pairwise`
for the table of many; `figures` has what their pictures are made of. Nothing here computes
transport.
"""
