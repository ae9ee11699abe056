"""The report of one flow: `writing` writes all files; the other modules draw one picture each.

`commands.adapt` and `FlowResult.plot` (`flows.result`) call `writing`.
"""
