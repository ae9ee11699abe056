"""Which of many datasets is nearest: an index of their self terms, bounds, and the race for places.

`index` keeps what is known of every member before a query comes; `bounds` proves how near a member
is, cheaply first; `race` decides where to spend, until the first places are proven. The command
`otdd_flash.nearest` and users call `otdd.index` and `otdd.nearest`.
"""
